#!/usr/bin/env bash
# Make sure that a RabbitMQ answers on 127.0.0.1:5672: the one that runs, else one that is installed (Debian, as root)
# and started here. Ends with an error, and says why, where none can be had. Nothing is changed on one that runs.
set -u -o pipefail

answers() { rabbitmqctl --quiet --timeout 20 await_startup 2>/dev/null; }

if ! command -v rabbitmqctl >/dev/null; then
    echo "no rabbitmqctl: installing rabbitmq-server"
    export DEBIAN_FRONTEND=noninteractive
    # The package's own start fails where no init runs: it is started below.
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends rabbitmq-server; } >/dev/null ||
        { echo "rabbitmq-server could not be installed (apt-get, as root)" >&2; exit 1; }
fi
if ! answers; then
    echo "no RabbitMQ answers: starting one"
    rabbitmq-server -detached || { echo "rabbitmq-server -detached failed" >&2; exit 1; }
    for _ in $(seq 30); do
        answers && break
        sleep 1
    done
fi
answers || { echo "RabbitMQ does not answer: see /var/log/rabbitmq" >&2; exit 1; }
rabbitmqctl --quiet version | sed 's/^/RabbitMQ /'
