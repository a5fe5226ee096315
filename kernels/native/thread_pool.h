// A pool of threads that wait a moment for the next job before they sleep: within a step the next
// one follows within microseconds, between steps other processes share the cores.
// Any number of callers may run jobs at the same time; each works on its own job too.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "shares.h"

namespace illm {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { serve(i); });
  }

  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    has_job_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int num_threads() const { return (int)threads_.size() + 1; }

  // Calls work(share) on as many threads as are free; each takes indices from its share until none
  // of 0..count-1 is left. Returns when all are done.
  template <class Work>
  void share_out(int count, const Work& work) {
    const auto call = [](const void* w, Share share) { (*static_cast<const Work*>(w))(share); };
    Job job(call, &work, count, num_threads());
    if (threads_.empty() || count <= 1) return job.work(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(&job);
      num_jobs_.store((int)jobs_.size());
    }
    for (int i = 1; i < count && i <= (int)threads_.size(); ++i) has_job_.notify_one();
    job.work(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      withdraw(&job);
    }
    if (spin([&job] { return job.num_helpers.load() == 0; })) return;
    std::unique_lock<std::mutex> lock(mutex_);
    is_left_.wait(lock, [&job] { return job.num_helpers.load() == 0; });
  }

  // Calls function(i) for every i in 0..count-1, in any order, and returns when all are done.
  template <class Function>
  void run(int count, const Function& function) {
    share_out(count, [&](Share share) {
      for (int i; share.take(i);) function(i);
    });
  }

 private:
  struct Job {
    void (*call)(const void*, Share);
    const void* function;
    Shares shares;
    std::atomic<int> num_helpers{0};  // grows under the pool's mutex only

    Job(void (*c)(const void*, Share), const void* f, int count, int num_threads)
        : call(c), function(f), shares(count, num_threads) {}

    void work(int thread) { call(function, Share(shares, thread)); }
  };

  void serve(int thread) {
    for (;;) {
      spin([this] { return num_jobs_.load() > 0; });
      std::unique_lock<std::mutex> lock(mutex_);
      has_job_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
      Job* job = jobs_.front();
      ++job->num_helpers;
      lock.unlock();
      job->work(thread);
      lock.lock();
      withdraw(job);
      // From here on the job may be gone: its caller watches the count without the mutex.
      if (--job->num_helpers == 0) is_left_.notify_all();
    }
  }

  // The mutex is held. A job that was worked on has no index left to hand out.
  void withdraw(Job* job) {
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
    num_jobs_.store((int)jobs_.size());
  }

  // Whether `is_done` came true soon.
  template <class Condition>
  static bool spin(const Condition& is_done) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    do {
      for (int i = 0; i < kChecksPerLook; ++i) {
        if (is_done()) return true;
#if defined(__x86_64__)
        _mm_pause();
#endif
      }
    } while (std::chrono::steady_clock::now() < until);
    return false;
  }

  static constexpr std::chrono::microseconds kPatience{150};  // waking a thread costs a third
  static constexpr int kChecksPerLook = 16;

  std::mutex mutex_;
  std::condition_variable has_job_;
  std::condition_variable is_left_;
  std::vector<Job*> jobs_;
  std::atomic<int> num_jobs_{0};
  std::vector<std::thread> threads_;
  bool stopping_ = false;
};

}  // namespace illm
