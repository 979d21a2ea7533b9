from tests.checks.harness import found, skipped


def fan(*loads):
    """Independent kernels, each with a stream and a time."""
    return "x:Placeholder; " + "; ".join(
        f"k{n}:MatMul(x)@{time}us[_stream_id={stream}]" for n, (stream, time) in enumerate(loads)
    )


def test_finds_a_stream_with_most_of_the_work():
    (one,) = found(fan((0, 30), (0, 30), (0, 30), (1, 10), (2, 10), (3, 10)), "MS012")
    assert one.text == "stream 0 has 90 µs of work, 3.00 times the 30 µs that 4 streams could come down to (limit: 2)"


def test_passes_equal_loads_and_a_limit_that_allows_more():
    assert found(fan((0, 30), (1, 30)), "MS012") == []
    assert found(fan((0, 30), (0, 30), (0, 30), (1, 10), (2, 10), (3, 10)), "MS012", max_imbalance=3.5) == []


def test_passes_a_long_path_that_no_stream_could_shorten():
    chain = (
        "x:Placeholder; a:MatMul(x)@50us; b:Relu(a)@50us; c:MatMul(x)@1us[_stream_id=1]; d:MatMul(x)@1us[_stream_id=2]"
    )
    assert found(chain, "MS012") == []


def test_says_nothing_of_one_stream():
    assert skipped(fan((0, 30), (0, 1)), "MS012") == "all kernels run on one stream"
