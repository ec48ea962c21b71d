#include "pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {
namespace {

void relax() {
#if defined(__x86_64__)
    _mm_pause();  // 25 to 40 ns on current processors
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    word.wait(value);
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
    word.notify_all();
#endif
}

bool reached(uint32_t now, uint32_t wanted) { return static_cast<int32_t>(now - wanted) >= 0; }  // survives wrapping

constexpr int kSpins = 2500;       // about 60 to 100 us: longer than any barrier of an undisturbed step
constexpr int kStartSpins = 8000;  // about 200 to 300 us: longer than what lies between two steps
constexpr int kCrowdedSpins = 8;   // more threads than processors: whoever is awaited needs this processor

// Company: a step is disturbed when a thread slept for more than this share of it
constexpr double kLongShare = 0.25;
constexpr int kLeastAlone = 2, kMostAlone = 64;    // steps
constexpr int kQuiet = 16;                         // undisturbed steps after which the past is forgotten
constexpr int kLeastTrust = 8, kMostTrust = 1024;  // steps

double time_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

void Epoch::advance(uint32_t to) {
    value_.store(to, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) wake_all(value_);
}

double Epoch::await(uint32_t at_least, int spins, Ahead& ahead) const {
    for (int i = 0; i < spins; i++) {
        if (reached(now(), at_least)) return 0;
        if (ahead.at < ahead.end)
            ahead.ask();
        else
            relax();
    }
    const double from = time_now();
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    for (uint32_t seen; !reached(seen = value_.load(std::memory_order_seq_cst), at_least);) sleep_while(value_, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return time_now() - from;
}

void Company::ran(int rows, double seconds, double slept) {
    if (alone_ > 0) {
        if (rows == rows_ && (fastest_ == 0 || seconds < fastest_)) fastest_ = seconds;
        if (--alone_ == 0) part();
    } else if (unjudged_ > 0) {
        unjudged_--;
    } else if (slept > kLongShare * seconds) {
        meet(rows, seconds);
    } else if (++undisturbed_ >= kQuiet) {
        penance_ = trust_ = 0;
    }
}

void Company::meet(int rows, double seconds) {
    alone_ = penance_ = std::clamp(2 * penance_, kLeastAlone, kMostAlone);
    undisturbed_ = 0;
    rows_ = rows;
    disturbed_ = seconds;
    fastest_ = 0;
}

void Company::part() {
    if (fastest_ <= disturbed_) {
        trust_ = 0;
    } else {
        unjudged_ = trust_ = std::clamp(2 * trust_, kLeastTrust, kMostTrust);
        penance_ = 0;
    }
}

int allowed_processors() {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    const unsigned n = std::thread::hardware_concurrency();
    return n ? static_cast<int>(n) : 1;
}

Pool::Pool(int threads)
    : threads_(threads), spins_(threads <= allowed_processors() ? kSpins : kCrowdedSpins), process_(getpid()) {
    if (threads < 1 || threads > 256)
        throw std::invalid_argument("threads must lie between 1 and 256, not " + std::to_string(threads));
    seats_ = std::make_unique<Seat[]>(threads);
    workers_.reserve(threads);
    try {
        for (int t = 1; t < threads; t++) workers_.emplace_back(&Pool::work, this, t);
    } catch (const std::system_error&) {
        end();
        throw std::runtime_error("the system does not give this process " + std::to_string(threads) + " threads");
    }
}

void Pool::end() {
    job_ = nullptr;
    start_.advance(start_.now() + 1);
    for (std::thread& w : workers_) w.join();
}

Pool::~Pool() {
    if (getpid() != process_) {  // forked: there is nobody to join
        for (std::thread& w : workers_) w.detach();
        return;
    }
    end();
}

void Pool::stay() const {
    if (getpid() != process_)
        throw std::runtime_error("this executor was made before a fork; make a new one in the child");
}

void Pool::run(Job job, void* context) {
    stay();
    job_ = job;
    context_ = context;
    seats_[0].slept = 0;
    start_.advance(start_.now() + 1);
    job(context, 0);
    barrier(0);
}

void Pool::run_alone(Job job, void* context) {
    stay();
    alone_ = true;
    job(context, 0);
    alone_ = false;
}

// Everyone announces itself on its own line and looks at all the others: one cache miss of delay with few threads, and
// with many the misses overlap.
void Pool::barrier(int thread, Ahead ahead) {
    if (alone_) return;
    Seat& mine = seats_[thread];
    const uint32_t round = ++mine.passed;
    mine.arrived.advance(round);
    for (int t = 0; t < threads_; t++)
        if (t != thread)
            if (const double slept = seats_[t].arrived.await(round, spins_, ahead); slept > 0)
                mine.slept.store(mine.slept.load(std::memory_order_relaxed) + slept, std::memory_order_relaxed);
}

double Pool::slept() const {
    double most = 0;
    for (int t = 0; t < threads_; t++) most = std::max(most, seats_[t].slept.load(std::memory_order_relaxed));
    return most;
}

void Pool::work(int thread) {
    for (uint32_t round = 1;; round++) {
        Ahead nothing;
        start_.await(round, spins_ == kSpins ? kStartSpins : spins_, nothing);
        if (!job_) return;
        seats_[thread].slept = 0;
        job_(context_, thread);
        barrier(thread);
    }
}

}  // namespace headrace
