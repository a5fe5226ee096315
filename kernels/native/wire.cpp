#include "wire.h"

#include <cerrno>
#include <cstring>

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "clock.h"

namespace illm {
namespace {

bool fail(Wire& wire, int status) {
  wire.status = status;
  return false;
}

// Why a call failed; the kernel ends what it waited for too long with EAGAIN.
bool fail_with_errno(Wire& wire) { return fail(wire, errno == EAGAIN ? ETIMEDOUT : errno); }

bool is_ready(const Wire& wire) {
  char first;
  const ssize_t got = recv(wire.socket, &first, 1, MSG_PEEK | MSG_DONTWAIT);
  return got >= 0 || (errno != EAGAIN && errno != EINTR);
}

// Whether something came, or the socket has failed, which the next read tells.
bool await(const Wire& wire, double spin_s, double patience_s) {
  const double until_s = now_s() + spin_s;
  do {
    if (is_ready(wire)) return true;
    sched_yield();  // where others want this core, they get it
  } while (now_s() < until_s);
  if (patience_s <= 0) return true;
  pollfd polled{wire.socket, POLLIN, 0};
  return poll(&polled, 1, int(patience_s * 1e3)) != 0;
}

bool receive(Wire& wire, void* into, size_t size) {
  char* at = static_cast<char*>(into);
  double started_s = 0;
  for (size_t left = size; left > 0;) {
    const ssize_t got = recv(wire.socket, at, left, MSG_WAITALL);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_with_errno(wire);
    if (got == 0) return fail(wire, kClosed);
    at += got, left -= got;
    if (started_s == 0) started_s = now_s();
    if (left > 0 && now_s() - started_s >= wire.timeout_s) return fail(wire, ETIMEDOUT);
  }
  return true;
}

}  // namespace

bool send_message(Wire& wire, int layer, const void* payload, size_t size) {
  const char* head = wire.sent_heads + size_t(layer) * wire.head_bytes;
  iovec pieces[2] = {{const_cast<char*>(head), size_t(wire.head_bytes)},
                     {const_cast<void*>(payload), size}};
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = 2;
  const double started_s = now_s();
  while (message.msg_iovlen > 0) {
    ssize_t sent = sendmsg(wire.socket, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return fail_with_errno(wire);
    for (; message.msg_iovlen > 0 && size_t(sent) >= message.msg_iov->iov_len; --message.msg_iovlen)
      sent -= message.msg_iov++->iov_len;
    if (message.msg_iovlen == 0) break;
    message.msg_iov->iov_base = static_cast<char*>(message.msg_iov->iov_base) + sent;
    message.msg_iov->iov_len -= sent;
    if (now_s() - started_s >= wire.timeout_s) return fail(wire, ETIMEDOUT);
  }
  ++wire.num_sent;
  return true;
}

bool receive_message(Wire& wire, int layer, void* payload, size_t size, double spin_s,
                     double patience_s) {
  const double started_s = now_s();
  const bool came = await(wire, spin_s, patience_s) || fail(wire, kNothingCame);
  const bool is_whole = came && receive(wire, wire.head, wire.head_bytes) &&
                        (!std::memcmp(wire.head, wire.awaited_heads + size_t(layer) * wire.head_bytes,
                                      wire.head_bytes) ||
                         fail(wire, kOtherHead)) &&
                        receive(wire, payload, size);
  wire.waited_s += now_s() - started_s;
  wire.num_received += is_whole;
  return is_whole;
}

}  // namespace illm
