#!/usr/bin/env bash
# Make sure that a RabbitMQ answers on 127.0.0.1:5672: the one that runs, else one that is installed (Debian, as root)
# and started here. Ends with an error, and says why, where none can be had. Nothing is changed on one that runs.
set -u -o pipefail

answers() { rabbitmqctl --quiet --timeout 20 await_startup 2>/dev/null; }

if ! command -v rabbitmqctl >/dev/null; then
    echo "no rabbitmqctl: installing rabbitmq-server"
    export DEBIAN_FRONTEND=noninteractive
    # What counts is that it is there then: the package's own start of it may fail where no init runs, and apt-get with it.
    said=$(apt-get update -qq 2>&1 && apt-get install -y -qq --no-install-recommends rabbitmq-server 2>&1)
    if ! command -v rabbitmqctl >/dev/null; then
        printf '%s\nrabbitmq-server could not be installed (apt-get, as root)\n' "$said" >&2
        exit 1
    fi
fi
if ! answers; then
    echo "no RabbitMQ answers: starting one"
    # Without our streams: what waits for their end would wait for the server's.
    said=$(mktemp)
    rabbitmq-server -detached </dev/null >"$said" 2>&1
    status=$?
    deadline=$((SECONDS + 90))
    until [ "$status" != 0 ] || answers; do
        if [ "$SECONDS" -ge "$deadline" ]; then status=1; fi
        sleep 1
    done
    cat "$said" >&2
    rm "$said"
    if [ "$status" != 0 ]; then
        echo "RabbitMQ does not start or does not answer: see above, and /var/log/rabbitmq" >&2
        exit 1
    fi
fi
rabbitmqctl --quiet version | sed 's/^/RabbitMQ /'
