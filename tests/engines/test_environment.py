"""What a measurement says of where it was taken."""

import subprocess

from msplit.engines import environment as environments


def test_the_commit_is_msplits_own_and_not_that_of_a_repository_around_it(tmp_path, monkeypatch):
    def git(*arguments):
        options = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", "-C", tmp_path, *options, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    (tmp_path / "venv").mkdir()
    installed = tmp_path / "venv" / "environment.py"
    installed.write_text("")
    (tmp_path / ".gitignore").write_text("venv\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "theirs")
    monkeypatch.setattr(environments, "__file__", str(installed))
    assert environments.environment()["commit"] is None
    git("add", "-f", ".")
    git("commit", "-q", "-m", "a checkout of msplit")
    assert environments.environment()["commit"] == git("rev-parse", "HEAD")


def test_mps_is_asked_for_and_started(tmp_path, monkeypatch):
    """By a daemon that runs once it was started, if it may be."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    control, runs, refused = tmp_path / "nvidia-cuda-mps-control", tmp_path / "runs", tmp_path / "refused"
    assert "is not installed here" in environments.mps(start=True)
    control.write_text(
        f'#!/bin/sh\nif [ "$1" = -d ]; then test ! -e {refused} && touch {runs}; else grep -q get_server_list && test -e {runs}; fi\n'
    )
    control.chmod(0o700)
    refused.touch()
    assert environments.mps() == "its daemon does not run: `nvidia-cuda-mps-control -d` starts it"
    assert "`nvidia-cuda-mps-control -d` fails here" in environments.mps(start=True)
    refused.unlink()
    assert not runs.exists(), "it is not started unless that is wanted"
    assert environments.mps(start=True) == environments.mps() == ""
