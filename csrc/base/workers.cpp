#include "base/workers.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvpage {
namespace {

constexpr auto kWorkerLooks = std::chrono::microseconds(100);  // for the next call of the same step
constexpr auto kCallerLooks = std::chrono::microseconds(200);  // for the end of a worker's share

struct Job {
  void (*call)(void*, int);
  void* context;
  int num_shares;
  std::atomic<int> next{0};

  void work() {
    for (int share; (share = next.fetch_add(1, std::memory_order_relaxed)) < num_shares;) call(context, share);
  }
};

enum State : int { kIdle, kOffered, kAtWork, kDone };

// A caller writes `job`, and `state` from kIdle to kOffered and from kDone to kIdle; the worker in between. The order
// of `state` is sequential: notifying looks for who waits, and must not do so before the new state can be seen.
struct Worker {
  std::atomic<int> state{kIdle};
  Job* job = nullptr;
  Worker* next = nullptr;  // of a list, of which each worker is in one at most
};

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Returns once the state is, or is no longer, as asked for, or after `longest`.
template <typename IsThere>
bool look(const Worker& worker, std::chrono::microseconds longest, const IsThere& is_there) {
  const auto end = std::chrono::steady_clock::now() + longest;
  do {
    for (int i = 0; i < 16; ++i) {
      if (is_there(worker.state.load())) return true;
      pause_briefly();
    }
    std::this_thread::yield();  // whoever else wants this processor goes first
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// The body of a thread.
void serve(Worker& worker) {
  for (;;) {
    look(worker, kWorkerLooks, [](int state) { return state == kOffered; });
    for (int state; (state = worker.state.load()) != kOffered;) worker.state.wait(state);
    int offered = kOffered;
    if (!worker.state.compare_exchange_strong(offered, kAtWork)) continue;
    worker.job->work();
    worker.state.store(kDone);
    worker.state.notify_one();
  }
}

// Starts a thread that gets no signals but those of its own faults: the others are the caller's, which Python lets act
// on them. Throws where the system gives no thread.
void start(Worker& worker) {
  sigset_t all, before;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::exception_ptr error;
  try {
    std::thread(serve, std::ref(worker)).detach();
  } catch (...) {
    error = std::current_exception();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error) std::rethrow_exception(error);
}

class Pool {
 public:
  // Returns a list of at most `num` idle workers. Starts what the pool lacks to have so many in all.
  Worker* take(int num) {
    Worker* taken = nullptr;
    std::lock_guard lock(mutex_);
    for (; num_workers_ < num; ++num_workers_)
      if (!add_worker()) break;
    for (; num > 0 && idle_; --num) {
      Worker* const worker = idle_;
      idle_ = worker->next;
      worker->next = taken;
      taken = worker;
    }
    return taken;
  }

  void give_back(Worker* list) {
    std::lock_guard lock(mutex_);
    while (list) {
      Worker* const worker = list;
      list = worker->next;
      worker->next = idle_;
      idle_ = worker;
    }
  }

 private:
  bool add_worker() {
    try {
      auto worker = std::make_unique<Worker>();
      start(*worker);
      worker->next = idle_;
      idle_ = worker.release();  // its thread's from now on
      return true;
    } catch (const std::exception&) {  // no thread, or no memory for one
      return false;
    }
  }

  std::mutex mutex_;
  Worker* idle_ = nullptr;
  int num_workers_ = 0;
};

// Never destroyed: threads wait in it until the process ends. A child of fork has none of them, and its copy of the
// mutex may be locked for ever, so it forgets the pool.
std::atomic<Pool*> current_pool{nullptr};

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); });

Pool& pool() {
  if (Pool* found = current_pool.load()) return *found;
  auto made = std::make_unique<Pool>();
  Pool* found = nullptr;
  if (current_pool.compare_exchange_strong(found, made.get())) found = made.release();
  return *found;
}

void offer(Worker* list, Job& job) {
  for (Worker* worker = list; worker; worker = worker->next) {
    worker->job = &job;
    worker->state.store(kOffered);
    worker->state.notify_one();
  }
}

// Takes back what no worker has begun, and waits for the others.
void collect(Worker* list) {
  for (Worker* worker = list; worker; worker = worker->next) {
    int offered = kOffered;
    if (worker->state.compare_exchange_strong(offered, kIdle)) continue;
    if (!look(*worker, kCallerLooks, [](int state) { return state == kDone; }))
      while (worker->state.load() == kAtWork) worker->state.wait(kAtWork);
    worker->state.store(kIdle);
  }
}

}  // namespace

void run_on_workers(int num_shares, void (*call)(void*, int), void* context) {
  Job job{call, context, num_shares};
  Pool& workers = pool();
  Worker* const taken = workers.take(num_shares - 1);
  offer(taken, job);
  job.work();
  collect(taken);
  workers.give_back(taken);
}

}  // namespace kvpage
