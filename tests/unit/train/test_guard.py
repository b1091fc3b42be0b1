import signal
import threading
from pathlib import Path

import pytest

from paceline.errors import TrainingError
from paceline.train.loop import LossGuard, StopRequest
from paceline.train.step import StepFigures

SAVED = Path("runs/x/checkpoints/step-00000040")


def figures(loss: float = 1.0, norm: float = 1.0) -> StepFigures:
    return StepFigures(loss=loss, gradient_norm=norm, num_tokens=1, chunk_tokens=256)


def settled() -> LossGuard:
    return LossGuard(10.0, [1.0] * 30)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_at_once_and_names_step_and_checkpoint(loss: float):
    said = f"became {loss} at step 41; .* {SAVED}/model; restart from it"
    with pytest.raises(TrainingError, match=said):
        settled().check(41, figures(loss), SAVED)
    with pytest.raises(TrainingError, match="no checkpoint was saved yet"):
        settled().check(1, figures(loss), None)


def test_an_explosion_is_three_steps_above_ten_times_the_median():
    guard = settled()
    guard.check(1, figures(10.5), SAVED)
    assert not guard.calm
    guard.check(2, figures(1e6), SAVED)
    with pytest.raises(TrainingError, match="exploded: 11 at step 3, median 1"):
        guard.check(3, figures(11.0), SAVED)


def test_one_strange_batch_is_no_explosion():
    guard = settled()
    for step in range(20):
        guard.check(step, figures(50.0 if step % 3 == 2 else 1.0), SAVED)


def test_a_young_run_may_do_what_it_likes():
    guard = LossGuard(10.0)
    for step, loss in enumerate([1.0, 100.0, 100.0, 100.0, 100.0]):
        guard.check(step, figures(loss), None)
    assert guard.calm


def test_the_median_moves_with_the_run():
    guard = LossGuard(2.0)
    for step in range(300):
        guard.check(step, figures(1.01**step), SAVED)


@pytest.mark.parametrize("median", [-1e-9, 0.0, 1e-7])
def test_a_loss_near_zero_does_not_explode_by_rounding(median: float):
    guard = LossGuard(10.0, [median] * 30)
    for step in range(20):
        guard.check(step, figures(2e-6), SAVED)
        assert guard.calm
    for step in (21, 22):
        guard.check(step, figures(0.5), SAVED)
    with pytest.raises(TrainingError, match=r"exploded: 0\.5 at step 23"):
        guard.check(23, figures(0.5), SAVED)


def test_a_loss_of_another_objective_is_compared_with_losses_of_its_own():
    guard = settled()
    for step in range(1, 31):  # a hundred times the first objective's
        guard.check(step, figures(100.0), SAVED, phase=1)
    assert guard.calm
    assert (guard.phase, list(guard.recent)) == (1, [100.0] * 30)
    for step in (31, 32):
        guard.check(step, figures(1001.0), SAVED, phase=1)
    with pytest.raises(TrainingError, match="exploded: 1001 at step 33, median 100"):
        guard.check(33, figures(1001.0), SAVED, phase=1)


def test_an_objective_of_a_smaller_scale_is_not_held_to_the_larger_one():
    guard = settled()
    for step in range(1, 21):
        guard.check(step, figures(0.01), SAVED, phase=1)
    for step in (21, 22):
        guard.check(step, figures(0.2), SAVED, phase=1)
    with pytest.raises(TrainingError, match=r"exploded: 0.2 at step 23, median 0.01"):
        guard.check(23, figures(0.2), SAVED, phase=1)


def test_a_gradient_that_is_no_number_three_times_in_a_row_ends_the_run():
    guard = settled()
    for norms in ([float("nan"), float("inf"), 1.0], [float("inf")] * 2):
        for norm in norms:
            guard.check(1, figures(norm=norm), SAVED)
    with pytest.raises(TrainingError, match="gradient was not finite in 3 steps, up to step 9"):
        guard.check(9, figures(norm=float("nan")), SAVED)


def test_ctrl_c_is_a_wish_and_the_second_one_an_order():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as request:
        signal.raise_signal(signal.SIGINT)
        assert request.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone():
    seen: list[bool] = []

    def work() -> None:
        with StopRequest() as request:
            seen.append(request.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
