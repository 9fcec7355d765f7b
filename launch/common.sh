# shellcheck shell=bash
# What the launchers share; read by them, not run. Names are set here and used there:
# shellcheck disable=SC2034,SC2154

program=${0##*/}
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) ||
  { echo "$program needs bash 4.4 or newer, this is $BASH_VERSION (macOS: brew install bash)" >&2; exit 2; }

verb='' name='' image='' command=() dry_run='' with_value=() switches=()
# Seconds between two looks, and how many failed ones in a row are borne.
poll_seconds=${LAUNCH_POLL_SECONDS:-20} patience=${LAUNCH_PATIENCE:-15}
# What stands and is paid for, and the command that deletes it: said whenever a launcher ends without having deleted it.
paid='' delete_with=''
scratch=$(mktemp -d)

say() { echo "$program: $*" >&2; }
say_all_of() { sed "s/^/$program: /" "$1" >&2; }
fail() { say "$*"; exit 1; }
wrong() { say "$*; see launch/$program --help"; exit 2; }

# The usage is the comment at the top of each launcher.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0; }

# Whether the first word is one of the others.
one_of() { local word; for word in "${@:2}"; do [[ $word != "$1" ]] || return 0; done; return 1; }

# Reads VERB [NAME] [OPTION]... [-- COMMAND]. A launcher says in `with_value` and `switches` which options it has. Each
# sets the variable of its name: `--max-restarts 3` sets max_restarts to 3, `--dry-run` sets dry_run to yes.
read_arguments() {
  local variable
  verb=${1:---help}
  [[ $verb != --help && $verb != -h ]] || usage
  shift
  [[ ${1:--} == -* ]] || { name=$1; shift; }
  while (($#)); do
    variable=${1#--}
    variable=${variable//-/_}
    if [[ $1 == --help || $1 == -h ]]; then
      usage
    elif [[ $1 == -- ]]; then
      command=("${@:2}")
      return
    elif one_of "$1" --dry-run "${switches[@]}"; then
      printf -v "$variable" yes
    elif one_of "$1" "${with_value[@]}"; then
      [[ $# -ge 2 && -n $2 && $2 != -* ]] || wrong "$1 needs a value"
      printf -v "$variable" %s "$2"
      shift
    else
      wrong "unknown argument $1"
    fi
    shift
  done
}

need_name() { [[ $verb == list || $name =~ $1 ]] || wrong "$verb needs a NAME of $2"; }
need_image() { [[ -n $image ]] || wrong "$verb needs --image"; }
need_command() { ((${#command[@]})) || wrong "$verb needs -- COMMAND"; }
need_topology() { [[ $topology =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] || wrong "$verb needs --topology, as 4x4 or 4x4x8"; }

# Sets `hosts` to how many hosts of so many chips make up the topology.
count_hosts() {
  local chips=$((${topology//x/*}))
  ((chips % $1 == 0)) || wrong "$topology is $chips chips, which hosts of $1 do not make up"
  hosts=$((chips / $1))
}

quoted() { printf '%q ' "$@" | sed 's/ $//'; }

# Runs a command that changes something; with --dry-run, prints it, and files that are made for it without their folder.
act() {
  local text
  if [[ -z $dry_run ]]; then "$@"; else text=$(quoted "$@"); echo "${text//"$scratch/"/}"; fi
}

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
    say_all_of "$scratch/errors"
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

# After a refusal: asks whether what would be paid for is there all the same.
owe_unless_absent() { ask "$@" || answer=unknown; [[ $answer != ABSENT ]] || paid=''; }
