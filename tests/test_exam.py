"""The checks of the notebooks against every planted bug."""
from pico_vllm.exam import planted_bugs, run_exam


def test_every_planted_bug_is_caught_by_a_check_in_its_own_words():
    exam = run_exam()
    assert len(exam.bugs) == len(planted_bugs()) >= 30
    assert not exam.uncaught
    assert not exam.crashes
