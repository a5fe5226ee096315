"""What one request can usually use, while instances come and go."""

from services.router.capacity import RESTART_S, UsualCapacity


def test_who_is_away_for_a_moment_is_counted_and_who_stays_away_is_not() -> None:
    usual = UsualCapacity()
    seen = []
    for now_s, num_tokens in [(0, 100), (1, 60), (RESTART_S, 60), (RESTART_S + 1, 60)]:
        usual.note(num_tokens, now_s)
        seen.append(usual.num_tokens)
    assert seen == [100, 100, 100, 60]
    usual.note(80, RESTART_S + 2)
    assert usual.num_tokens == 80
