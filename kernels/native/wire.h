// Queries and partials of a step that cross a connected socket, whole layers without Python.
// A message is a head, whose bytes the caller gives for every layer, and a payload of known size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace illm {

enum WireStatus : int32_t { kFine = 0, kClosed = -1, kOtherHead = -2, kNothingCame = -3 };

// Mirrored by kernels/native/library.py.
struct Wire {
  int32_t socket, head_bytes;
  const char *sent_heads, *awaited_heads;  // of every layer, one after another
  char* head;                              // room for the one that comes
  double timeout_s;                        // the socket's own, for one message to move
  // What came of it: an errno or a WireStatus, messages since the call, seconds of waiting for them.
  int32_t status, num_sent, num_received;
  double waited_s;
};

// False where `status` says why not; the message may then be half sent.
bool send_message(Wire& wire, int layer, const void* payload, size_t size);

// The message awaited for this layer. Looks for `spin_s` before it sleeps, and gives up with
// kNothingCame once nothing came for `patience_s`; 0 leaves that to the socket's own timeout.
bool receive_message(Wire& wire, int layer, void* payload, size_t size, double spin_s,
                     double patience_s);

}  // namespace illm
