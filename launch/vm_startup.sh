#!/usr/bin/env bash
# Runs on a TPU VM as root: at boot, as its startup-script, or by ssh. queued_resource.sh and instance_group.sh put
# before it what it needs: bertjax_image, and bertjax_command as an array. systemd then keeps the command alive: it starts
# it at boot, and again after any exit status but 0, 1 and 2.
# shellcheck disable=SC2154
set -euo pipefail

root=${BERTJAX_ROOT:-}  # of the file system; set by tests
unit=$root/etc/systemd/system/bertjax.service
# At a later boot systemd has it already, perhaps with a newer command given by ssh.
if [[ -e $unit && -z ${bertjax_replace:-} ]]; then exit 0; fi

# Makes a program of what it is given.
make_program() { cat > "$root/usr/local/bin/$1"; chmod +x "$root/usr/local/bin/$1"; }

sed "s|/run/|$root/run/|" << 'END' | make_program bertjax-state
#!/usr/bin/env bash
# One line: `bertjax: setting up`, `bertjax: set-up failed`, `bertjax: running` or `bertjax: ended CODE`.
if [[ -e /run/bertjax-set-up-failed ]]; then
  echo 'bertjax: set-up failed'
elif [[ $(systemctl show bertjax --property=ExecMainStartTimestampMonotonic --value) =~ ^0?$ ]]; then
  echo 'bertjax: setting up'
elif [[ $(systemctl is-active bertjax) == @(active|activating|reloading|deactivating) ]]; then
  echo 'bertjax: running'
else
  echo "bertjax: ended $(systemctl show bertjax --property=ExecMainStatus --value)"
fi
END
failed=$root/run/bertjax-set-up-failed
rm -f "$failed"
trap 'touch "$failed"' ERR

for program in docker curl; do
  command -v "$program" > /dev/null || {
    apt-get -qq -o DPkg::Lock::Timeout=600 update
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 install --yes "${program/docker/docker.io}"
  }
done

token() {
  curl --silent --fail --header 'Metadata-Flavor: Google' \
    http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["access_token"])'
}
if [[ $bertjax_image == *-docker.pkg.dev/* ]]; then
  token | docker login --username oauth2accesstoken --password-stdin "https://${bertjax_image%%/*}"
fi
for attempt in 1 2 3 4 5; do
  docker pull --quiet "$bertjax_image" && break
  echo "bertjax: cannot pull $bertjax_image, attempt $attempt of 5" >&2
  ((attempt < 5))
  sleep "${BERTJAX_PULL_SECONDS:-10}"
done

mkdir -p "$root/var/lib/bertjax"
{
  echo '#!/usr/bin/env bash'
  printf '%q ' exec docker run --rm --name bertjax --privileged --network host --ulimit memlock=-1 \
    --log-driver local --log-opt max-size=50m \
    --volume /var/lib/bertjax:/scratch --env BERTJAX_STAGING=/scratch "$bertjax_image" "${bertjax_command[@]}"
} | make_program bertjax-run

# 180 seconds are longer than a save.
cat > "$unit" << END
[Unit]
Description=bertjax
Requires=docker.service
After=docker.service network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Environment=HOME=/root
ExecStartPre=-$(command -v docker) rm --force bertjax
ExecStart=/usr/local/bin/bertjax-run
ExecStop=-$(command -v docker) stop -t 180 bertjax
TimeoutStopSec=200
Restart=on-failure
RestartPreventExitStatus=1 2
RestartSec=10

[Install]
WantedBy=multi-user.target
END
systemctl daemon-reload
systemctl enable --quiet bertjax
systemctl restart bertjax
