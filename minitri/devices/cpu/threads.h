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
#if defined(__x86_64__) || defined(__i386__)
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

    // Threads that run tasks of the calling thread; the same for all calls of a process: they stay.
    static inline thread_local int64_t num_threads = 1;

    // `num_numbers` are read in all tasks: for few, the caller alone is faster than waking threads.
    // Calls of several threads follow each other. Throws a task's exception after all have ended.
    void run(int64_t n, int64_t num_numbers, const std::function<void(int64_t)>& task) {
        if (num_threads <= 1 || n == 1 || num_numbers < WORTH_WAKING) {
            for (int64_t i = 0; i < n; ++i) task(i);
            return;
        }
        std::lock_guard<std::mutex> only_one(calls);
        for (; num_workers < num_threads - 1; ++num_workers) {
            std::thread(&Pool::work, this, round.load()).detach();
        }
        current = &task;
        num_tasks = n;
        next.store(0, std::memory_order_relaxed);
        num_busy.store(num_workers, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> hold(sleep);
            round.fetch_add(1, std::memory_order_release);
        }
        wake.notify_all();
        take_tasks();
        for (int spins = 0; num_busy.load(std::memory_order_acquire) > 0; ++spins)
            if (spins < SPINS) pause_cpu();
            else std::this_thread::yield();
        if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
    }

  private:
    static constexpr int64_t WORTH_WAKING = 32768;
    static constexpr int SPINS = 4000;  // some 50 to 100 microseconds

    void take_tasks() {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
            try {
                (*current)(i);
            } catch (...) {
                std::lock_guard<std::mutex> hold(sleep);
                failure = std::current_exception();
            }
        }
    }

    void work(uint64_t seen) {
        for (;; ++seen) {
            for (int i = 0; i < SPINS && round.load(std::memory_order_acquire) == seen; ++i)
                pause_cpu();
            if (round.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> hold(sleep);
                wake.wait(hold, [&] { return round.load(std::memory_order_acquire) != seen; });
            }
            take_tasks();
            num_busy.fetch_sub(1, std::memory_order_release);
        }
    }

    std::mutex calls, sleep;
    std::condition_variable wake;
    const std::function<void(int64_t)>* current = nullptr;
    std::exception_ptr failure;  // the latest of a task
    int64_t num_tasks = 0;
    int num_workers = 0;
    alignas(64) std::atomic<uint64_t> round{0};
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int> num_busy{0};
};

}  // namespace
