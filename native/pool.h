// A team of threads that run one function together, in phases with a barrier between them.
// Owes: short waits spin, long waits sleep (an idle team uses no processor), a clean join. Knows nothing of what it
// runs.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace headrace {

// Memory that a thread will read next, to be asked for while it waits: [at, end).
struct Ahead {
    const uint8_t* at = nullptr;
    const uint8_t* end = nullptr;
    void ask() {  // for a few lines; into the second cache, which the wait may fill
        for (int i = 0; i < 4 && at < end; i++, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// A counter on a cache line of its own that one thread advances and others wait for.
class Epoch {
  public:
    void advance(uint32_t to);  // to: larger than before; wakes those asleep
    // Returns when the counter has reached `at_least`: whether the wait was so long that it slept.
    // Meanwhile it asks for what lies ahead.
    bool await(uint32_t at_least, int spins, Ahead& ahead) const;
    uint32_t now() const { return value_.load(std::memory_order_acquire); }

  private:
    alignas(64) std::atomic<uint32_t> value_{0};
    mutable std::atomic<uint32_t> sleepers_{0};
    char fill_[56] = {};
};

class Pool {
  public:
    // threads: the caller of `run` is one of them. Throws std::invalid_argument unless 1 to 256, std::runtime_error
    // when the system gives no more.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    using Job = void (*)(void* context, int thread);
    // Runs job(context, 0 .. threads - 1), thread 0 on the caller; returns when all have. Must not throw; not
    // re-entrant. Throws std::runtime_error in a process that was forked after the pool was made: its threads do not
    // exist there.
    void run(Job job, void* context);
    // Called by every thread of a running job, equally often: nobody passes before all have come.
    void barrier(int thread, Ahead ahead = {});
    // Runs job(context, 0) on the caller alone; its barriers are open. Throws after a fork, as `run` does.
    void run_alone(Job job, void* context);
    int threads() const { return threads_; }
    // How often thread 0 has slept in barriers of this run: often means that somebody else uses our processors.
    int long_waits() const { return long_waits_; }

  private:
    struct Seat {
        Epoch arrived;
        uint32_t passed = 0;  // of its own thread
    };
    void work(int thread);
    void end();         // of the workers
    void stay() const;  // throws in a forked process

    const int threads_;
    const int spins_;
    const int process_;
    std::unique_ptr<Seat[]> seats_;
    Epoch start_;
    int long_waits_ = 0;
    bool alone_ = false;
    Job job_ = nullptr;  // null asks the workers to end
    void* context_ = nullptr;
    std::vector<std::thread> workers_;
};

// Processors that this process may use.
int allowed_processors();

}  // namespace headrace
