// Memory that is used again and again: it grows, and goes with its owner.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#include "simd.h"

namespace illm {

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // On a cache line; what was in it may be lost.
  template <class T>
  T* take(int64_t count) {
    const size_t bytes = (count * sizeof(T) + kCacheLine - 1) / kCacheLine * kCacheLine;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(kCacheLine, bytes);
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace illm
