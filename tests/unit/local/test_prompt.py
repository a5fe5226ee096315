"""A prompt is as long as the cluster needs it to be, to the token."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from services.common.errors import ConfigError
from services.local.plan import ClusterSpec
from services.local.prompt import choose_num_tokens, cut_text


def spec(num_instances: int, num_blocks: int) -> ClusterSpec:
    return ClusterSpec(Path("/m"), "m", num_instances=num_instances, num_blocks=num_blocks)


def test_two_small_instances_get_a_prompt_that_one_cannot_hold() -> None:
    num_tokens = choose_num_tokens(spec(2, 96), max_model_len=8192, max_new_tokens=48)
    assert 96 * 16 < num_tokens < 2 * 96 * 16


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(2, 4096), st.integers(256, 8192), st.integers(1, 100))
def test_the_prompt_always_fits_the_model_and_the_cluster(
    num_instances: int, num_blocks: int, max_model_len: int, max_new_tokens: int
) -> None:
    cluster = spec(num_instances, num_blocks)
    total = cluster.instance_capacity_tokens * num_instances
    try:
        num_tokens = choose_num_tokens(cluster, max_model_len, max_new_tokens)
    except ConfigError:
        assert min(0.9 * total, max_model_len) < max_new_tokens + 100
    else:
        assert 1 <= num_tokens < min(total, max_model_len) - max_new_tokens


def test_a_cluster_too_small_for_any_prompt_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^2 KV blocks .* choose more with KV_BLOCKS=$"):
        choose_num_tokens(spec(2, 2), max_model_len=8192, max_new_tokens=48)


def words() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def test_texts_are_repeated_and_cut() -> None:
    assert cut_text(words(), ["a b", "c"], 5) == "a b c a b"


def test_a_long_text_is_cut() -> None:
    assert cut_text(words(), ["a b c"], 2) == "a b"


@pytest.mark.parametrize("texts", [[], [""]])
def test_no_text_is_an_error(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="no text"):
        cut_text(words(), texts, 5)
