# shellcheck shell=bash
# What the launchers share; read by them, not run. Names are set here and used there:
# shellcheck disable=SC2034,SC2154

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) ||
  { echo "$program needs bash 4.4 or newer, this is $BASH_VERSION (macOS: brew install bash)" >&2; exit 2; }

dry_run='' project='' zone="${CLOUDSDK_COMPUTE_ZONE:-}" image='' command=()
# Seconds between two looks, and how many failed ones in a row are borne.
poll_seconds=${LAUNCH_POLL_SECONDS:-20} patience=${LAUNCH_PATIENCE:-15}
# What stands and is paid for, and the command that deletes it: said whenever a launcher ends without having deleted it.
paid='' delete_with=''
scratch=$(mktemp -d)

say() { echo "$program: $*" >&2; }
fail() { say "$*"; exit 1; }
wrong() { say "$*; see launch/$program --help"; exit 2; }

# The usage is the comment at the top of each launcher.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0; }

# The value of the option that `$@` begins with.
value_of() { [[ $# -ge 2 && -n $2 && $2 != -- ]] || wrong "$1 needs a value"; printf '%s' "$2"; }

quoted() { printf '%q ' "$@" | sed 's/ $//'; }

# Runs a command that changes something; with --dry-run, prints it.
act() { if [[ -n $dry_run ]]; then quoted "$@"; echo; else "$@"; fi; }

# A signal ends `wait`, and would not end `sleep`.
pause() { sleep "$poll_seconds" & wait $!; }

on_exit() {
  local code=$?
  trap - EXIT INT TERM
  # What waits in the background does not get Ctrl-C.
  jobs -p | xargs kill 2> /dev/null || true
  rm -rf "$scratch"
  if [[ -n $paid && -z $dry_run ]]; then
    say "$paid exists, as far as is known, and is paid for until it is deleted:"
    echo "  $delete_with" >&2
  fi
  exit "$code"
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Sets `answer` to what a question to the cloud gives, or to ABSENT; 1 where it could not be asked.
ask() {
  if answer=$("$@" 2> "$scratch/errors"); then
    return 0
  elif grep -qE 'NOT_FOUND|NotFound|not found' "$scratch/errors"; then
    answer=ABSENT
  else
    sed "s/^/$program: /" "$scratch/errors" >&2
    return 1
  fi
}

# Asks again after a failure, some times; then gives up.
ask_patiently() {
  local failures=0
  until ask "$@"; do
    failures=$((failures + 1))
    ((failures < patience)) || fail "no answer, $failures times in a row, to: $(quoted "$@")"
    pause
  done
}
