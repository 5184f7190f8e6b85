"""Options are checked before anything is loaded."""

from pathlib import Path

import pytest

from marscli.benchmarking.config import BenchConfig
from marscli.errors import InputError


def test_defaults_and_forms():
    config = BenchConfig("m")
    assert config.methods == ("hf", "ar", "threshold")
    assert config.thresholds == (None, 0.95)
    assert config.batch_sizes == (1, 4)
    assert config.passes == (1 + 1 + 2) * 2 * (3 + 1)
    typed = BenchConfig("m", "out", methods="threshold,hf", thresholds="1.0,exact,0.9", batch_sizes=["4", "1", "4"])
    assert typed.methods == ("hf", "threshold")
    assert typed.thresholds == (None, 0.9)
    assert typed.batch_sizes == (1, 4)
    assert typed.output_dir == Path("out")
    assert typed.resolved()["thresholds"] == ["exact", 0.9]
    assert BenchConfig("m", thresholds=0.9, batch_sizes=2).batch_sizes == (2,)
    assert BenchConfig("m", thresholds=("exact", 0, 0.3), confidence="entropy").thresholds == (None, 0.3)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"methods": ("tresholds",)}, "--methods: there is no method 'tresholds'"),
        ({"methods": ()}, "--methods"),
        ({"thresholds": ("1.5",)}, "--thresholds: 1.5"),
        ({"thresholds": ("often",)}, "--thresholds: 'often'"),
        ({"thresholds": (-1,), "confidence": "entropy"}, "--thresholds: -1"),
        ({"thresholds": ()}, "--thresholds"),
        ({"batch_sizes": ("0",)}, "--batch-sizes: 0"),
        ({"batch_sizes": ("two",)}, "--batch-sizes: 'two'"),
        ({"batch_sizes": ()}, "--batch-sizes"),
        ({"repeats": 0}, "--repeats: 0"),
        ({"limit": 0}, "--limit: 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens: 0"),
        ({"prompt_tokens": 0}, "--prompt-tokens: 0"),
        ({"block_size": 0}, "--block-size: 0"),
        ({"block_size": 1}, "--block-size: 1"),
        ({"seed": 2**64}, "--seed 1"),
        ({"confidence": "guess"}, "--confidence: 'guess'"),
    ],
)
def test_wrong_options_name_their_flag(options, names):
    with pytest.raises(InputError) as error:
        BenchConfig("m", **options)
    assert error.value.message.startswith(names)
    assert error.value.hint


def test_a_typing_slip_gets_the_nearest_name():
    with pytest.raises(InputError) as error:
        BenchConfig("m", methods=("treshold",))
    assert "did you mean threshold?" in error.value.hint


def test_block_size_1_is_fine_without_threshold():
    assert BenchConfig("m", methods=("ar",), block_size=1).block_size == 1
