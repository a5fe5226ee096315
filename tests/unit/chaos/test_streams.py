import pytest

from tests.chaos.streams import Answer

WANTED = Answer(["a", "b", "c"], "length")


def test_a_whole_answer_must_be_the_same() -> None:
    assert Answer(["a", "b", "c"], "length").agrees_with(WANTED)
    assert not Answer(["a", "b"], "length").agrees_with(WANTED)
    assert not Answer(["a", "b", "x"], "length").agrees_with(WANTED)
    assert not Answer(["a", "b", "c"], "stop").agrees_with(WANTED)


def test_what_came_before_an_error_must_be_the_same() -> None:
    assert Answer(["a", "b"], None, "instance_lost").agrees_with(WANTED)
    assert not Answer(["a", "x"], None, "instance_lost").agrees_with(WANTED)


@pytest.mark.parametrize(
    ("code", "is_clear"),
    [
        ("instance_lost", True),
        ("overloaded", True),
        ("context_length_exceeded", True),
        ("internal_error", False),
        ("invalid_request", False),
        ("nobody knows", False),
        (None, False),
    ],
)
def test_an_error_is_clear_if_the_client_may_try_again(code: str | None, is_clear: bool) -> None:
    assert Answer(error_code=code).failed_clearly == is_clear
