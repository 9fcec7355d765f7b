"""Answer spans from the logits of passage windows."""

import numpy as np
import pytest

from bertjax.data.finetuning.questions import Question
from bertjax.data.finetuning.windows import Window
from bertjax.tasks.finetuning.spans import best_answers

# Two windows of the context "abcdef", with one token per character: "abcd" and "cdef". In each window, two tokens
# precede the passage. The tokens c and d have the most context in the first and the second window, respectively.
QUESTION = Question("1", "q", "abcdef", (), -1)
WINDOWS = [
    Window(0, 2, np.array([[i, i + 1] for i in range(first, first + 4)]), np.array(is_max_context))
    for first, is_max_context in ((0, [True, True, True, False]), (2, [False, True, True, True]))
]
START = np.array([[-9, -9, 1, 0, 2, 9], [-9, -9, -5, -4, -5, -5]], np.float32)
END = np.array([[-9, -9, 0, 7, 5.5, 2], [-9, -9, -5, -5, -4, -5]], np.float32)


@pytest.mark.parametrize(
    ("n_best", "max_answer_len", "text"),
    [
        # Start d (9) has more context in the other window, and the span from c (2) to b (7) is reversed.
        (4, 4, "ab"),
        (4, 1, "c"),
        # In the first window, the only start is d.
        (1, 4, "de"),
    ],
)
def test_best_span_is_valid_and_has_the_highest_score(n_best, max_answer_len, text):
    outputs = [{"start": START, "end": END, "example": np.array([0, 1])}]
    (answer,) = best_answers([QUESTION], WINDOWS, outputs, n_best, max_answer_len).values()
    assert answer.text == text
    assert len(answer.nbest) <= n_best and answer.null_score == -18
