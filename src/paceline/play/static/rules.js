// The built-in rules on the rows of a trace. docs/guides/playground.md describes the rows, and a
// test compares every rule with paceline.core.rules. Thresholds are compared in float32, as there.

const f32 = Math.fround;
const below = (value, peak, alpha) => value < f32(peak - f32(alpha));

// min(1, p / q); 1 where q is 0, which is never drawn
const ratio = (p, q) => (q > 0 ? Math.min(1, p / q) : 1);

// A choice: whether the rule defers to the target (null: it does not say), and its probability of
// accepting the drafted token (null: the trace does not have the numbers).
const relaxed = (f, strict) => (row, greedy) => {
  if (greedy && !strict) return { defers: null, accept: f(row.raw_p) >= row.peak_p ? 1 : 0 };
  return { defers: null, accept: ratio(f(row.p), row.q) };
};

const binary = (defers) => (row) => {
  const deferred = defers(row);
  return { defers: deferred, accept: deferred ? ratio(row.p, row.q) : 1 };
};

// pi(v) = q(v) where v is not deferred, plus p(v) times the draft's mass on deferred tokens. The
// tokens that are not deferred must be among those that the trace lists.
const byToken = (own, at, most, threshold) => (row) => {
  const limit = threshold(row);
  const defers = row[own] < limit;
  let mass = row.rest_q;
  if (limit <= 0) mass = 0;
  else if (row[most] >= limit) return { defers, accept: null };
  else for (const one of row.likeliest) if (one[at] < limit) mass += one[0];
  return { defers, accept: ratio((defers ? 0 : row.q) + row.p * mass, row.q) };
};

const infinite = (value) => value ?? Infinity; // JSON has no infinity
const SHAPES = {
  linear: (epsilon) => (p) => p / epsilon,
  square: (epsilon) => (p) => p / epsilon ** 2,
  exponential: (epsilon) => (p) => p ** epsilon,
};

export const RULES = {
  lossless: () => relaxed((p) => p, true),
  lenient: ({ kind, epsilon }) => relaxed(SHAPES[kind](epsilon), epsilon === 1),
  lossy: ({ alpha }) => relaxed((p) => p / (1 - alpha), alpha === 0),
  bild: ({ threshold }) => binary((row) => infinite(row.cross_entropy) > threshold),
  chow: ({ alpha }) => binary((row) => row.peak_q < f32(1 - alpha)),
  chow_log: ({ alpha }) => binary((row) => row.entropy_q > alpha),
  diff: ({ alpha }) => binary((row) => below(row.peak_q, row.peak_p, alpha)),
  diff_log: ({ alpha }) => binary((row) => -row.entropy_q < -row.entropy_p - alpha),
  opt: ({ alpha }) => binary((row) => below(row.peak_q, row.peak_p, f32(f32(alpha) * row.tvd))),
  opt_log: ({ alpha }) => binary((row) => -row.entropy_q < -row.entropy_p - alpha * row.tvd),
  token_v1: ({ alpha }) => byToken("raw_q", 2, "most_raw_q", (row) => f32(row.peak_p - f32(alpha))),
  token_v2: ({ alpha }) => byToken("raw_p", 1, "most_raw_p", (row) => f32(row.peak_p - f32(alpha))),
  token_v3: ({ alpha }) => byToken("raw_p", 1, "most_raw_p", (row) => f32(f32(1 - alpha) * row.peak_p)),
};

// The choice of a rule, such as {rule: "opt", alpha: 0.2}, at a row; null for a rule of someone else.
export const choose = (rule, row, greedy) => {
  const make = Object.hasOwn(RULES, rule.rule) ? RULES[rule.rule] : null;
  if (!make) return null;
  const choice = make(rule)(row, greedy);
  return { ...choice, accepts: choice.accept === null ? null : row.uniform < choice.accept };
};
