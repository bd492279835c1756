// Requests that any thread hands in, and one thread makes the passes of: together where the engine
// lets them share passes, else in turns.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cache/arena.h"
#include "decode/loop.h"
#include "decode/shared_pass.h"

namespace dlm {

using Clock = std::chrono::steady_clock;

// How many rows of keys and values `most` of the requests take together, whichever they are.
int64_t most_rows(const std::vector<Request>& requests, size_t most);

// When a request ends whatever it has, and who is told of its steps.
struct Limits {
  int32_t max_steps = 0;  // 0: any number
  std::optional<Clock::time_point> deadline;
  dlm_step_fn on_step = nullptr;
  void* user = nullptr;
};

// What those who wait for jobs share with who runs them, and outlives both.
struct Board {
  std::mutex mutex;
  std::condition_variable changed;
};

// A request that was handed in. Its results are there once it is done, and then nobody else touches
// it.
class Job {
 public:
  Job(std::shared_ptr<Board> board, Request request, const Limits& limits);

  // Ends it within one pass with what it has. From any thread.
  void cancel() { is_cancelled_ = true; }

  // Whether it is done, after waiting for that; no time: as long as it takes.
  bool wait(std::optional<Clock::duration> time) const;

  // Of a job that is done.
  dlm_status status() const { return status_; }
  const std::string& message() const { return message_; }
  const Outcome& outcome() const { return outcome_; }
  const std::vector<int32_t>& canvas() const { return request().canvas(); }

 private:
  friend class Scheduler;

  const Request& request() const { return alone_ ? alone_->requests().front() : *request_; }
  void end(Finish why) { alone_ ? alone_->end(0, why) : request_->end(why); }
  void drop() noexcept { alone_ ? alone_->drop(0) : request_->drop(); }

  const std::shared_ptr<Board> board_;
  const Limits limits_;
  std::optional<Request> request_;
  std::optional<Member> member_;      // of shared passes, while it runs
  std::optional<Batch> alone_;        // takes the request where passes are not shared
  std::unique_ptr<Context> context_;  // its own, then
  int64_t rows_ = 0;                  // of keys and values that it was given
  double usual_ms_ = 0;               // that it is expected to add to a pass
  uint64_t served_ = 0;               // the pass that it took part in last
  std::atomic<bool> is_cancelled_{false};
  bool is_done_ = false;  // under the board's mutex
  dlm_status status_ = DLM_OK;
  std::string message_;
  Outcome outcome_{};
};

class Scheduler {
 public:
  struct Options {
    int32_t most_running, most_waiting,
        most_tokens;     // requests; tokens of a pass that several share
    int64_t rows;        // of keys and values
    double most_ms = 0;  // that a pass which several share is expected to take; 0: any time
    PassCost cost{};
  };

  // The denoiser and the engine must outlive it.
  Scheduler(const Denoiser& denoiser, Engine& engine, const Options& options);
  // Must not be called while a thread is in run(). Cancels the requests that are not done.
  ~Scheduler();

  // From any thread. Throws Error(DLM_BUSY) if max_waiting requests wait,
  // Error(DLM_INVALID_ARGUMENT) if the request could never run, and the error that ended the last
  // call of run().
  std::shared_ptr<Job> submit(Request request, const Limits& limits);

  // Makes passes until stop() is called or, with until_idle, until no request is left. before_pass
  // is called before each pass. If it returns false, the call throws Error(DLM_CANCELLED). The
  // requests stay as they are for the next call.
  //
  // An error of one request ends that request alone. Any other error ends every request with its
  // status and message, and is thrown; until the next call of run(), submit() throws it too. Throws
  // Error(DLM_INVALID_ARGUMENT) if another thread is in this call.
  void run(bool until_idle, const std::function<bool()>& before_pass);
  // Ends the current call of run() after its pass; without one, the next call returns at once.
  void stop();

  // Those who run it, or between runs.
  const dlm_stats& stats() const { return stats_; }
  const dlm_pass_counts& counts() const { return counts_; }

  dlm_scheduler_stats told() const;

 private:
  using Jobs = std::list<std::shared_ptr<Job>>;

  // A status and its sentence.
  struct Failure {
    dlm_status status;
    std::string message;
  };

  double most_ms() const { return options_.most_ms / pace_; }  // by the cost
  void note_pace(double times);
  bool has_room(const Job& job) const;
  void settle();
  void end_what_must();
  void admit();
  void start(Job& job);
  bool make_passes(bool until_idle, const std::function<bool()>& before_pass,
                   std::unique_lock<std::mutex>& lock);
  static Failure thrown() noexcept;
  static void end(Job& job, Finish why) noexcept;
  static void fail_job(Job& job, const Failure& failure) noexcept;
  static void fail_with_thrown(Job& job) noexcept;
  void fail_all_with_thrown() noexcept;
  void finish(Job& job) noexcept;
  void finish_done();
  std::vector<std::shared_ptr<Job>> choose();
  void pass(const std::vector<std::shared_ptr<Job>>& chosen);
  void pass_alone(Job& job);

  const Denoiser& denoiser_;
  Engine& engine_;
  const Options options_;
  const std::shared_ptr<Board> board_ = std::make_shared<Board>();
  std::unique_ptr<Arena> arena_;  // NULL where passes are not shared
  std::optional<SharedPass> shared_;
  std::vector<std::unique_ptr<Context>> contexts_;  // that no request uses now
  Buffers buffers_;
  Jobs waiting_, running_;  // in the order of their coming
  int64_t rows_taken_ = 0;
  bool is_running_ = false, is_stopping_ = false;
  std::optional<Failure> failure_;  // that ended the last run; under the board's mutex
  uint64_t passes_ = 0;
  double pace_ = 1;  // how many times as long as the cost says passes take here and now, 1 at least
  dlm_stats stats_{};
  dlm_pass_counts counts_{};
  dlm_scheduler_stats told_{};  // under the board's mutex
};

}  // namespace dlm
