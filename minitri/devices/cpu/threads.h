// The threads that all kernels share.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace {

inline void pause_cpu() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Runs tasks 0..n-1 on all threads, the caller's included; a free thread takes the next task. An
// idle worker spins for a moment, since the next kernel of a pass follows within microseconds, and
// then sleeps, to leave the core to others.
class Pool {
  public:
    static Pool& get() {
        static Pool* pool = new Pool;  // never destroyed: its threads end with the process
        return *pool;
    }

    // Threads that run tasks of the calling thread; the same for all calls, as threads stay.
    static inline thread_local int64_t num_threads = 1;

    // `num_numbers` are read in all tasks: for few, the caller alone is faster than waking threads.
    // Calls of several threads follow each other. Throws a task's exception after all have ended.
    void run(int64_t n, int64_t num_numbers, const std::function<void(int64_t)>& task) {
        if (num_threads <= 1 || n == 1 || num_numbers < WORTH_WAKING) {
            for (int64_t i = 0; i < n; ++i) task(i);
            return;
        }
        std::lock_guard<std::mutex> only_one(calls);
        for (; num_workers < num_threads - 1; ++num_workers)
            std::thread(&Pool::work, this).detach();
        current = &task;
        num_tasks = n;
        num_ended.store(0, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> hold(sleep);
            num_left.store(n, std::memory_order_release);
        }
        wake.notify_all();
        take_tasks();
        for (int spins = 0; num_ended.load(std::memory_order_acquire) < n; ++spins)
            if (spins < SPINS) pause_cpu();
            else std::this_thread::yield();
        if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
    }

  private:
    static constexpr int64_t WORTH_WAKING = 32768;
    static constexpr int SPINS = 4000;  // some 50 to 100 microseconds

    // Who takes a number above 0 from `num_left` has a task, for which its call waits. A call waits
    // for no worker that has none: one may be asleep, or without a core while other programs run.
    void take_tasks() {
        while (num_left.load(std::memory_order_relaxed) > 0) {
            const int64_t left = num_left.fetch_sub(1, std::memory_order_acquire);
            if (left <= 0) return;
            try {
                (*current)(num_tasks - left);
            } catch (...) {
                std::lock_guard<std::mutex> hold(sleep);
                failure = std::current_exception();
            }
            num_ended.fetch_add(1, std::memory_order_release);
        }
    }

    void work() {
        auto has_tasks = [&] { return num_left.load(std::memory_order_relaxed) > 0; };
        for (;; take_tasks()) {
            for (int i = 0; i < SPINS && !has_tasks(); ++i) pause_cpu();
            if (has_tasks()) continue;
            std::unique_lock<std::mutex> hold(sleep);
            wake.wait(hold, has_tasks);
        }
    }

    std::mutex calls, sleep;
    std::condition_variable wake;
    const std::function<void(int64_t)>* current = nullptr;
    std::exception_ptr failure;  // the latest of a task
    int64_t num_tasks = 0;
    int num_workers = 0;
    alignas(64) std::atomic<int64_t> num_left{0};   // tasks that nobody has taken; or below 0
    alignas(64) std::atomic<int64_t> num_ended{0};  // of this call
};

}  // namespace
