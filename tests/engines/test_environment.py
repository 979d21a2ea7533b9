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
