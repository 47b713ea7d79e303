// Threads that wait for short calls. Starting a thread takes 10 to 30 us; waking one that still looks for work takes
// less than one, and waking one that sleeps takes a few.
//
//   caller   takes idle workers ── offers them its job ── works on it, too ── takes back what none has begun ── waits
//   worker                           looks for 0.1 ms, then sleeps ── works on it ── says so
//
// A caller waits for a worker only while that one is at work. So no call waits for another one, and a worker that the
// system delays holds nobody up. Workers are started when a call first wants so many, and live as long as the process.
// The pool is no larger than the greatest wish of one call: where several threads call at once, they share it. A child
// process starts its own.
#pragma once

namespace kvpage {

// Runs call(context, share) for each share in [0, num_shares), on this thread and on workers, and returns when all are
// done. Where there are fewer workers than shares, some run several. `call` must not throw.
void run_on_workers(int num_shares, void (*call)(void* context, int share), void* context);

}  // namespace kvpage
