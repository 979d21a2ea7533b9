"""Command lines of TensorFlow Serving: each of its flags is taken, accepted with a word, or refused with a reason, as the table says."""

from __future__ import annotations

import re

import click
import pytest

from msplit.cli.engine_options import notes
from msplit.cli.main import cli
from tests.cli.runner import ROOT

VALUES = {
    "port": "8499",
    "rest_api_port": "0",
    "model_config_file_poll_wait_seconds": "60",
    "file_system_poll_wait_seconds": "2",
    "saved_model_tags": "serve,gpu",
    "enable_batching": "true",
    "enable_serialization_as_tensor_content": "true",
    "grpc_channel_arguments": "grpc.max_connection_age_ms=2000,grpc.default_authority=a",
}
SWITCHES = (
    "rest_api_enable_cors_support",
    "enable_batching",
    "allow_version_labels_for_unavailable_models",
    "enable_per_model_batching_parameters",
    "flush_filesystem_caches",
    "use_alts_credentials",
    "enable_model_warmup",
    "version",
    "remove_unused_fields_from_bundle_metagraph",
    "prefer_tflite_model",
    "enable_signature_method_name_check",
    "xla_cpu_compilation_enabled",
    "xla_gpu_compilation_enabled",
    "enable_profiler",
    "skip_initialize_tpu",
    "enable_grpc_healthcheck_service",
    "enable_serialization_as_tensor_content",
)
"""Flags of tensorflow_serving/model_servers/main.cc of TensorFlow Serving 2.21 with truth values."""
OTHERS = (
    "port",
    "grpc_socket_path",
    "rest_api_port",
    "rest_api_num_threads",
    "rest_api_timeout_in_ms",
    "batching_parameters_file",
    "model_config_file",
    "model_config_file_poll_wait_seconds",
    "model_name",
    "model_base_path",
    "num_load_threads",
    "num_unload_threads",
    "max_num_load_retries",
    "load_retry_interval_micros",
    "file_system_poll_wait_seconds",
    "tensorflow_session_parallelism",
    "tensorflow_session_config_file",
    "tensorflow_intra_op_parallelism",
    "tensorflow_inter_op_parallelism",
    "ssl_config_file",
    "platform_config_file",
    "per_process_gpu_memory_fraction",
    "saved_model_tags",
    "grpc_channel_arguments",
    "grpc_max_threads",
    "num_request_iterations_for_warmup",
    "monitoring_config_file",
    "num_tflite_pools",
    "num_tflite_interpreters_per_pool",
    "thread_pool_factory_config_file",
    "mixed_precision",
)
"""All others of them."""


def table() -> dict[str, tuple[str, str]]:
    text = (ROOT / "docs" / "options.md").read_text()
    rows = re.findall(r"^\| `--(\w+)` \| (taken|accepted|refused) \| (.+) \|$", text, re.MULTILINE)
    return {name: (verdict, why) for name, verdict, why in rows}


def parsed(*arguments: str) -> click.Context:
    command = cli.get_command(click.Context(cli), "serve")
    assert command is not None
    return command.make_context("serve", ["model", *arguments])


def test_the_table_has_each_flag_of_tensorflow_serving() -> None:
    assert {*table()} == {*SWITCHES, *OTHERS}


@pytest.mark.parametrize("verdict", ["taken", "accepted", "refused"])
def test_each_flag_does_what_the_table_says(verdict: str) -> None:
    plain = parsed().params
    for name, why in [(name, why) for name, (one, why) in table().items() if one == verdict]:
        value = "true" if name in SWITCHES else VALUES.get(name, "4")
        lines = [f"--{name}={value}", f"--{name.replace('_', '-')}={value}"]
        for line in [*lines, *([f"--{name}"] if name in SWITCHES else [])]:
            if verdict == "refused":
                with pytest.raises(click.UsageError) as caught:
                    parsed(line)
                assert caught.value.format_message() == f"--{name} is not done here: {why}."
            elif verdict == "accepted":
                assert parsed(line).params == plain
                assert [*notes(parsed(line))] == [f"--{name} changes nothing here: {why}"]
            else:
                assert parsed(line).params[name] != plain[name] or name == "enable_batching"
        if verdict == "refused":
            off = parsed(f"--{name}={'false' if name in SWITCHES else ''}")
            assert (off.params, [*notes(off)]) == (plain, [])


def test_a_usual_command_line_is_taken() -> None:
    context = parsed(
        *("--port=9000", "--rest_api_port=9001", "--model_config_file=models.config", "--enable_batching=true"),
        *("--file_system_poll_wait_seconds=60", "--grpc_channel_arguments=grpc.max_connection_age_ms=2000,a.b=c"),
        *("--rest_api_num_threads=16", "--tensorflow_intra_op_parallelism=8", "--use_alts_credentials=false"),
    )
    assert context.params["grpc_channel_arguments"] == (("grpc.max_connection_age_ms", 2000), ("a.b", "c"))
    assert len(notes(context)) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--rest_api_ports=1", "No such option"),
        ("--grpc_max_thread=1", "No such option"),
        ("--enable_model_warmup=maybe", "maybe"),
        ("--grpc_channel_arguments=a", "NAME=VALUE"),
    ],
)
def test_what_is_no_flag_is_an_error(line: str, said: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        parsed(line)
    assert said in caught.value.format_message()
