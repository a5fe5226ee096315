// Seconds of a clock that never goes back.
#pragma once

#include <chrono>

namespace illm {

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace illm
