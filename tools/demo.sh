#!/bin/sh
# The commands of README.md on one target: tools/demo.sh TARGET OUT. `make demo` runs it.
# A stopped run continues: what OUT holds is not made again. Exit code 0: decoding is lossless, and
# the verdict at temperature 1 or 0 is GO; 1: it is NO-GO at both, or a test failed; 3: no verdict.
set -eu
target=$1 out=$2
weights=${WEIGHTS:-int8}  # of the measured draft; WEIGHTS=auto where the processor is not x86
aligned=$out/align/draft

step() { printf '\n== %s\n' "$1"; }

measured() {  # when temperature draft prompts timed
    file=$out/measure-$1-t$2.json
    test -e "$file" && return
    step "Measure the draft $1 alignment (temperature $2, held-out prompts)"
    # exit code 1 is NO-GO, 3 undecided
    paceline measure --target "$target" --draft "$3" --prompts "$out/data/prompts.jsonl" \
        --raw --set max_prompt_tokens=32 --set max_new_tokens=64 --set batch_size=32 --temperature "$2" \
        --num-prompts "$4" --timed-prompts "$5" --draft-weights "$weights" --json >"$file.part" ||
        test -s "$file.part"
    mv "$file.part" "$file"
}

if ! test -e "$out/data/pretraining.jsonl"; then
    step "Write Python's documentation as training and held-out text"
    paceline corpus --out "$out/data" --overwrite
fi
if ! test -e "$out/draft-before"; then
    step "Create a draft from layers of the target"
    paceline draft --target "$target" --layers "${LAYERS:-0,1,2,29}" --out "$out/draft-before" \
        --vocabulary 12288 --text "$out/data/train.jsonl"
fi
# a weak draft shows on few texts; the final figures need narrow intervals
for t in 1 0; do measured before $t "$out/draft-before" 32 8; done
step "Align the draft with the target (six minutes)"
resume=
test -e "$out/align/manifest.json" && resume=--resume
paceline align --config configs/align/quick.yaml --target "$target" --draft "$out/draft-before" \
    --output "$out/align" --data "$out/data/beginnings.jsonl" --raw --max-prompt-tokens 32 $resume
for t in 1 0; do measured after $t "$aligned" 64 64; done
step "Verify that speculative decoding is lossless (float32)"
lossless=0
paceline verify --target "$target" --draft "$aligned" --prompts "$out/data/prompts.jsonl" \
    --raw --set max_prompt_tokens=32 --max-new-tokens 64 --draft-weights "$weights" --self-test ||
    lossless=$?
step "Decode a text, coloured by the source of each token"
paceline decode --target "$target" --draft "$aligned" --draft-weights "$weights" --gamma 2 --raw \
    --temperature 0 --max-new-tokens 64 --show --prompt "Return a list of the names in"
step "Before and after"
verdict=0
python tools/demo_table.py "$out" || verdict=$?
echo "The aligned draft is in $aligned, all figures are in $out."
test $lossless = 0 || exit $lossless
exit $verdict
