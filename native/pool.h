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
    // Returns when the counter has reached `at_least`: the seconds it slept, 0 when spinning was enough.
    // Meanwhile it asks for what lies ahead.
    double await(uint32_t at_least, int spins, Ahead& ahead) const;
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
    // Seconds that one thread, the one that waited most, has slept in barriers of this run.
    double slept() const;

  private:
    struct Seat {
        Epoch arrived;
        uint32_t passed = 0;           // of its own thread
        std::atomic<double> slept{0};  // in this run
    };
    void work(int thread);
    void end();         // of the workers
    void stay() const;  // throws in a forked process

    const int threads_;
    const int spins_;
    const int process_;
    std::unique_ptr<Seat[]> seats_;
    Epoch start_;
    bool alone_ = false;
    Job job_ = nullptr;  // null asks the workers to end
    void* context_ = nullptr;
    std::vector<std::thread> workers_;
};

// Whether somebody else uses our processors, and how many threads a short step should then have. A thread that lost its
// processor keeps the others waiting at every barrier, so one thread is often faster: it is tried for a few steps,
// twice as many each time that all threads meet company again soon. When it turns out slower, all threads run for a
// while whatever happens, twice as long each time. Knows times of steps; not what is in them.
class Company {
  public:
    explicit Company(int threads) : threads_(threads) {}
    // Threads for the next step: all or one.
    int threads() const { return alone_ > 0 ? 1 : threads_; }
    // How that step went. rows: steps of as many take about as long; slept: see Pool, 0 when one thread ran it.
    void ran(int rows, double seconds, double slept);

  private:
    void meet(int rows, double seconds);
    void part();

    const int threads_;
    int alone_ = 0, penance_ = 0;   // steps to run on one thread yet; of how many
    int unjudged_ = 0, trust_ = 0;  // steps to run on all threads whatever happens yet; of how many
    int undisturbed_ = 0;           // steps of all threads since one was disturbed
    int rows_ = 0;                  // of that one
    double disturbed_ = 0;          // its seconds
    double fastest_ = 0;            // of the steps alone with as many rows; 0: there was none
};

// Processors that this process may use.
int allowed_processors();

}  // namespace headrace
