#!/usr/bin/env bash
# On a machine with Python 3.12 and pip: set up zerojax and train a small GPT on the standard library's
# source, in a few minutes. Options go to `zerojax train`, such as --train.steps 50.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."
echo "Installing into .venv ..."
"$here/setup.sh"
.venv/bin/zerojax train gpt-tiny "$@"
echo
echo "Let it write:  .venv/bin/zerojax sample runs/gpt-tiny --prompt 'def '"
