// A pool of threads that sleep while there is nothing to do: other processes share the cores.
// Any number of callers may run jobs at the same time; each works on its own job too.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace illm {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { serve(); });
  }

  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    has_job_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Calls function(i) for every i in 0..count-1, in any order, and returns when all are done.
  template <class Function>
  void run(int count, const Function& function) {
    Job job{[](const void* f, int i) { (*static_cast<const Function*>(f))(i); }, &function, count};
    if (threads_.empty() || count <= 1) return job.work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(&job);
    }
    for (int i = 1; i < count && i <= (int)threads_.size(); ++i) has_job_.notify_one();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    withdraw(&job);
    is_left_.wait(lock, [&job] { return job.num_helpers == 0; });
  }

 private:
  struct Job {
    void (*call)(const void*, int);
    const void* function;
    int count;
    std::atomic<int> next{0};
    int num_helpers = 0;  // guarded by the pool's mutex

    void work() {
      for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) call(function, i);
    }
  };

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      has_job_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
      Job* job = jobs_.front();
      ++job->num_helpers;
      lock.unlock();
      job->work();
      lock.lock();
      withdraw(job);
      if (--job->num_helpers == 0) is_left_.notify_all();
    }
  }

  // The mutex is held. A job that was worked on has no index left to hand out.
  void withdraw(Job* job) {
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end());
  }

  std::mutex mutex_;
  std::condition_variable has_job_;
  std::condition_variable is_left_;
  std::vector<Job*> jobs_;
  std::vector<std::thread> threads_;
  bool stopping_ = false;
};

}  // namespace illm
