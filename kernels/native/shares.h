// How the indices of a job are shared among threads: each has a contiguous range of its own, so that
// it reads memory in order and knows where it goes on; whoever is done takes from the far end of
// others' ranges.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace illm {

class Shares {
 public:
  Shares(int count, int num_threads) : num_threads_(std::min(num_threads, kMaxThreads)) {
    for (int i = 0; i < num_threads_; ++i)
      held_[i].store(pack(begin_of(i, count), begin_of(i + 1, count)));
  }

  int num_threads() const { return num_threads_; }

  // Where the range of a thread begins, of 0..count-1.
  int begin_of(int thread, int count) const { return int(int64_t(count) * thread / num_threads_); }

  // The next index for a thread; false when none is left.
  bool take(int thread, int& index) {
    if (take_first(thread, index)) return true;
    for (int i = 1; i < num_threads_; ++i)
      if (take_last((thread + i) % num_threads_, index)) return true;
    return false;
  }

 private:
  static constexpr int kMaxThreads = 64;

  static uint64_t pack(int begin, int end) { return uint64_t(end) << 32 | uint32_t(begin); }
  static int begin(uint64_t held) { return int(uint32_t(held)); }
  static int end(uint64_t held) { return int(held >> 32); }

  bool take_first(int thread, int& index) {
    uint64_t held = held_[thread].load(std::memory_order_relaxed);
    while ((index = begin(held)) < end(held))
      if (held_[thread].compare_exchange_weak(held, pack(index + 1, end(held)))) return true;
    return false;
  }

  bool take_last(int thread, int& index) {
    uint64_t held = held_[thread].load(std::memory_order_relaxed);
    while ((index = end(held) - 1) >= begin(held))
      if (held_[thread].compare_exchange_weak(held, pack(begin(held), index))) return true;
    return false;
  }

  const int num_threads_;
  std::atomic<uint64_t> held_[kMaxThreads];
};

// One thread's part in a job.
class Share {
 public:
  Share(Shares& shares, int thread) : shares_(shares), thread_(thread % shares.num_threads()) {}

  bool take(int& index) { return shares_.take(thread_, index); }

  // The thread's own range of a job of so many indices.
  int begin_of(int count) const { return shares_.begin_of(thread_, count); }
  int end_of(int count) const { return shares_.begin_of(thread_ + 1, count); }

 private:
  Shares& shares_;
  const int thread_;
};

}  // namespace illm
