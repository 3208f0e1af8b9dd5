"""MurmurHash3_x86_32 against its published verification values, and the properties that runs rely on."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.base.keyed_hash import StepKey, hash_words, mix, name_word

WORD = st.integers(0, 2**32 - 1)


def test_known_answers():
    # SMHasher's and Wikipedia's vectors with a length of a multiple of four bytes.
    assert hash_words() == 0
    assert hash_words(seed=1) == 0x514E28B7
    assert hash_words(seed=0xFFFFFFFF) == 0x81F16F39
    assert hash_words(0xFFFFFFFF) == 0x76293B50
    assert hash_words(0x87654321) == 0xF55B516B
    assert hash_words(0x87654321, seed=0x5082EDEE) == 0x2362F9DE
    assert hash_words(0) == 0x2362F9DE
    assert hash_words(int.from_bytes(b"test", "little")) == 0xBA6BD213
    assert hash_words(int.from_bytes(b"test", "little"), seed=0x9747B28C) == 0x704B81DC


@given(WORD, WORD)
def test_mix_is_a_bijection(a, b):
    assert (mix(a) == mix(b)) == (a == b)


@given(st.lists(WORD, min_size=1, max_size=4), WORD)
def test_every_word_and_the_seed_change_the_hash(words, seed):
    before = hash_words(*words, seed=seed)
    assert 0 <= before < 2**32
    changed = [*words[:-1], words[-1] ^ 1]
    assert hash_words(*changed, seed=seed) != before


def test_bits_are_balanced():
    counts = [0] * 32
    for i in range(4000):
        h = hash_words(i, 7, seed=3)
        for bit in range(32):
            counts[bit] += h >> bit & 1
    assert all(abs(count - 2000) < 4 * 31.7 for count in counts)  # 4 sigma of a fair coin


def test_names_and_keys():
    assert name_word("layers.0.attention.q_proj.weight") == name_word("layers.0.attention.q_proj.weight")
    assert len({name_word(f"layers.{i}") for i in range(1000)}) == 1000
    assert StepKey(1, 2, 3).word(4) != StepKey(1, 2, 4).word(4) != StepKey(2, 2, 3).word(4)
