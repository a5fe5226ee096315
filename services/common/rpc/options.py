"""Channel arguments shared by both ends of every connection."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_SIZES: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

#: A peer that vanished without a FIN, or whose process is stopped, is noticed within this time.
DEAD_AFTER_S = 15.0


def client_options(dead_after_s: float) -> list[tuple[str, int]]:
    """The transport answers pings by itself, so a peer that computes for long is not dead."""
    half_ms = int(dead_after_s * 500)
    return [
        *_SIZES,
        # Of silence, then as long again for the answer; also while no call is open.
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        # The bound that holds for a ping that is under way; by default a minute.
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A worker that restarts must be found again in about a second, not after two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Two channels to one address must not share a connection whose back-off one of them caused.
        ("grpc.use_local_subchannel_pool", 1),
    ]


SERVER_OPTIONS: list[tuple[str, int]] = [
    *_SIZES,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two processes on one port would take each other's calls: fail to bind instead.
    ("grpc.so_reuseport", 0),
]
