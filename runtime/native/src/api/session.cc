// The C ABI of sessions, which run requests on the caller's thread.
#include "api/session.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "api/prompt_cache.h"

using dlm::make_canvas, dlm::require, dlm::Runner;

namespace {

template <typename Body>
dlm_status guarded(dlm_session* session, Body body) {
  if (session == nullptr) return DLM_INVALID_ARGUMENT;
  const auto report = [&](const char* text) {
    session->last_error = text;
    dlm::make_one_line(session->last_error.data(), session->last_error.size());
  };
  // Rejects a call if an earlier call on the same session is still running, for example because a
  // callback makes the call. The new call would destroy the request or the buffers that the running
  // call uses.
  const auto refuse = [] {
    dlm::fail(DLM_INVALID_ARGUMENT,
              "this session is already in a call: callbacks must not call it, and each thread "
              "needs its own session, or a scheduler");
  };
  if (session->is_running) return dlm::guarded(refuse, report);
  session->is_running = true;
  session->last_error.clear();
  const dlm_status status = dlm::guarded(body, report);
  // The call succeeded, but last_error may contain the message of a rejected call from a callback.
  if (status == DLM_OK) session->last_error.clear();
  session->is_running = false;
  return status;
}

void set_jobs(dlm_session& session, std::vector<std::shared_ptr<dlm::Job>> jobs) {
  const std::lock_guard<std::mutex> lock(session.jobs_mutex);
  session.jobs.swap(jobs);
}

Runner& runner_of(dlm_session& session) {
  return session.shared != nullptr ? session.shared->runner : session.runner;
}

// Drops all requests, but keeps the prefix cache.
void drop(dlm_session& session) {
  runner_of(session).drop_all();
  set_jobs(session, {});
  if (session.prefix_cache_bytes == 0) session.shared.reset();
}

bool is_done(const dlm::Job& job) { return job.wait(dlm::Clock::duration(0)); }

void require_before_pass(const dlm_session& session) {
  if (!session.before_pass()) dlm::fail(DLM_CANCELLED, "before_pass asked to stop");
}

// Runs the session's jobs. If an error is thrown, ends all jobs.
void run(dlm_session& session, Runner::Until until) {
  try {
    runner_of(session).run(until, session.before_pass);
  } catch (...) {
    drop(session);
    throw;
  }
}

// Prepares session.shared for requests that need `rows` cache rows together. Does nothing if the
// engine cannot share passes.
void share_passes(dlm_session& session, const dlm::RowCounts& rows) {
  if (session.shared != nullptr && rows.fits(session.shared->passes->rows())) return;
  session.shared.reset();
  const dlm::Denoiser& denoiser = session.bundle.manifest.denoiser;
  const int32_t page = dlm::page_rows(denoiser.visible_block);
  const uint64_t most = session.prefix_cache_bytes / dlm::row_bytes(denoiser.cache);
  const int64_t kept = std::min<uint64_t>(most, INT32_MAX) / page * page;
  // Even without a prefix cache, requests that run at the same time can share pages of their
  // prompts.
  const int64_t window_kept = dlm::window_of(denoiser.cache) > 0 ? kept : 0;
  const dlm::RowCounts room{std::max(rows.full, kept), std::max(rows.window, window_kept)};
  if (auto passes =
          dlm::make_shared_passes(denoiser, *session.bundle.engine, room,
                                  kept > 0 ? kept : room.full, session.bundle.prompt_caches))
    session.shared = std::make_unique<dlm_session::SharedRunner>(denoiser, std::move(passes));
}

void start(dlm_session& session, const dlm_request* request) {
  drop(session);
  dlm::Wanted wanted = dlm::read_request(session.bundle, request);
  // Cache rows of earlier requests can be reused only in shared passes. So a single request runs in
  // shared passes only if rows of its prompt may be stored already.
  const bool has_stored = session.prefix_cache_bytes > 0 || !session.bundle.prompt_caches.empty();
  const dlm::Denoiser& denoiser = session.bundle.manifest.denoiser;
  if (has_stored && wanted.request.reusable() > 0)
    share_passes(session, dlm::rows_of(wanted.request, dlm::page_rows(denoiser.visible_block)));
  else
    session.shared.reset();
  Runner& runner = runner_of(session);
  runner.set_most_running(1);
  session.passes.set_together(1);
  set_jobs(session, {runner.submit(std::move(wanted.request), std::move(wanted.options))});
}

void throw_error(const dlm::Job& job, const std::string& name = "") {
  const dlm_result& result = job.result();
  if (result.status != DLM_OK) throw dlm::Error(result.status, name + result.message);
}

// Groups requests that can run in lockstep. Adds each request to the first suitable group that has
// room, or starts a new group. Returns the indices of the requests, group by group.
std::vector<size_t> lockstep_order(const dlm::Engine& engine,
                                   const std::vector<dlm::Wanted>& requests, size_t max_batch) {
  std::vector<std::vector<size_t>> batches;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto takes = [&](const auto& batch) {
      return batch.size() < max_batch && requests[batch[0]].request.fits(requests[i].request);
    };
    const auto found = std::find_if(batches.begin(), batches.end(), takes);
    (found == batches.end() ? batches.emplace_back() : *found).push_back(i);
  }
  std::vector<size_t> order;
  for (const std::vector<size_t>& batch : batches) {
    dlm::check_batch(engine, static_cast<int32_t>(batch.size()));
    order.insert(order.end(), batch.begin(), batch.end());
  }
  return order;
}

// Returns the largest number of cache rows that any `most` of the requests need together. Each
// canvas reserves a multiple of `page_rows` rows.
dlm::RowCounts most_rows(const std::vector<dlm::Wanted>& requests, size_t most, int32_t page_rows) {
  std::vector<int64_t> full, window;
  for (const dlm::Wanted& wanted : requests) {
    const dlm::RowCounts rows = dlm::rows_of(wanted.request, page_rows);
    full.push_back(rows.full), window.push_back(rows.window);
  }
  const auto largest = [most](std::vector<int64_t>& rows) {
    std::sort(rows.rbegin(), rows.rend());
    rows.resize(std::min(rows.size(), most));
    return std::accumulate(rows.begin(), rows.end(), int64_t{0});
  };
  return {largest(full), largest(window)};
}

// Runs the requests in shared passes or in lockstep. At most max_batch requests run at the same
// time.
void run_batch(dlm_session& session, std::vector<dlm::Wanted> requests, int32_t max_batch) {
  const auto most = static_cast<size_t>(max_batch);
  const dlm::Denoiser& denoiser = session.bundle.manifest.denoiser;
  share_passes(session, most_rows(requests, most, dlm::page_rows(denoiser.visible_block)));
  std::vector<size_t> order(requests.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (session.shared == nullptr) {
    session.passes.set_together(most);
    order = lockstep_order(*session.bundle.engine, requests, most);
  }
  Runner& runner = runner_of(session);
  runner.set_most_running(max_batch);
  std::vector<std::shared_ptr<dlm::Job>> jobs(requests.size());
  for (const size_t number : order)
    jobs[number] =
        runner.submit(std::move(requests[number].request), std::move(requests[number].options));
  set_jobs(session, std::move(jobs));
  run(session, Runner::Until::idle);
}

}  // namespace

dlm_status dlm_session_create(dlm_bundle* bundle, char* message, size_t message_capacity,
                              dlm_session** session) {
  return dlm::make(session, "session", message, message_capacity, [&] {
    require(bundle, "bundle");
    return new dlm_session(*bundle);
  });
}

void dlm_session_destroy(dlm_session* session) { delete session; }

const char* dlm_session_last_error(const dlm_session* session) {
  return session == nullptr ? "session is NULL" : session->last_error.c_str();
}

dlm_status dlm_session_before_pass(dlm_session* session, dlm_before_pass_fn before_pass,
                                   void* user) {
  return guarded(session, [&] {
    session->before_pass = [=] { return before_pass == nullptr || before_pass(user) == 0; };
  });
}

dlm_status dlm_session_prefix_cache(dlm_session* session, uint64_t bytes) {
  return guarded(session, [&] {
    drop(*session);
    session->shared.reset();
    session->prefix_cache_bytes = bytes;
  });
}

dlm_status dlm_session_save_prompt_cache(dlm_session* session, const int32_t* tokens, size_t count,
                                         const char* path, size_t* saved) {
  if (saved != nullptr) *saved = 0;
  return guarded(session, [&] {
    drop(*session);
    const size_t done = dlm::save_prompt_cache(session->bundle, tokens, count, path,
                                               [&] { require_before_pass(*session); });
    if (saved != nullptr) *saved = done;
  });
}

dlm_status dlm_session_generate(dlm_session* session, const dlm_request* request,
                                const dlm_result** result) {
  if (result != nullptr) *result = nullptr;
  return guarded(session, [&] {
    start(*session, request);
    run(*session, Runner::Until::idle);
    if (result != nullptr) *result = &session->jobs[0]->result();
    throw_error(*session->jobs[0]);
  });
}

dlm_status dlm_session_generate_batch(dlm_session* session, const dlm_request* const* requests,
                                      size_t request_count, int32_t max_batch) {
  return guarded(session, [&] {
    drop(*session);
    dlm::check_range("max_batch", max_batch, 1, dlm::kMostRequests);
    dlm::check_count(requests, request_count, "requests");
    const auto name_of = [](size_t i) { return "request " + std::to_string(i) + ": "; };
    std::vector<dlm::Wanted> wanted;
    for (size_t i = 0; i < request_count; ++i) {
      try {
        wanted.push_back(dlm::read_request(session->bundle, requests[i]));
      } catch (const dlm::Error& error) {
        throw dlm::Error(error.status(), name_of(i) + error.what());
      }
    }
    if (request_count > 0) run_batch(*session, std::move(wanted), max_batch);
    for (size_t i = 0; i < request_count; ++i) throw_error(*session->jobs[i], name_of(i));
  });
}

dlm_status dlm_session_start(dlm_session* session, const dlm_request* request) {
  return guarded(session, [&] { start(*session, request); });
}

dlm_status dlm_session_step(dlm_session* session, const dlm_step** step) {
  if (step != nullptr) *step = nullptr;
  return guarded(session, [&] {
    require(step, "step");
    if (session->jobs.size() != 1)
      dlm::fail(DLM_INVALID_ARGUMENT, "no request is running: call dlm_session_start first");
    const dlm::Job& job = *session->jobs[0];
    if (!is_done(job)) run(*session, Runner::Until::pass);
    if (is_done(job)) throw_error(job);
    *step = &job.step();
  });
}

dlm_status dlm_session_result(dlm_session* session, size_t number, const dlm_result** result) {
  if (result != nullptr) *result = nullptr;
  return guarded(session, [&] {
    require(result, "result");
    if (number >= session->jobs.size() || !is_done(*session->jobs[number]))
      dlm::fail(DLM_INVALID_ARGUMENT,
                "request %zu has no result: the last call started %zu requests, and each has a "
                "result only after it has ended",
                number, session->jobs.size());
    *result = &session->jobs[number]->result();
  });
}

dlm_status dlm_session_logits(dlm_session* session, const int32_t* tokens, size_t count,
                              const int32_t* rows, size_t row_count, float* logits,
                              size_t capacity) {
  return guarded(session, [&] {
    drop(*session);
    const dlm::Denoiser& denoiser = session->bundle.manifest.denoiser;
    const std::vector<int32_t> canvas = make_canvas(denoiser, tokens, count, 0);
    require(rows, "rows");
    require(logits, "logits");
    const auto width = static_cast<size_t>(denoiser.vocab_size);
    if (row_count == 0 || row_count > count || capacity / width < row_count)
      dlm::fail(DLM_INVALID_ARGUMENT,
                "row_count = %zu must be in 1..%zu with a capacity of %zu floats a row", row_count,
                count, width);
    for (size_t i = 0; i < row_count; ++i)
      if (rows[i] < 0 || static_cast<size_t>(rows[i]) >= count)
        dlm::fail(DLM_INVALID_ARGUMENT, "row %d is outside the canvas (0..%zu)", rows[i],
                  count - 1);
    const dlm::Engine& engine = *session->bundle.engine;
    const auto length = static_cast<int32_t>(count);
    const auto most = static_cast<size_t>(engine.max_rows(length, 0));
    if (most == 0)
      dlm::fail(DLM_INVALID_ARGUMENT,
                "a pass over the whole canvas has %d tokens, but the engine takes %s: use fewer "
                "tokens, or build the engine again with a larger --canvas",
                length, engine.limits().c_str());
    dlm::Buffers& buffers = session->buffers;
    dlm::Piece piece{&canvas, {0, length}};
    const auto mask = std::find(canvas.begin(), canvas.end(), denoiser.mask_token_id);
    piece.first_block = static_cast<int32_t>(mask - canvas.begin());
    dlm::Pass pass = dlm::prepare_pass(denoiser, {piece}, 1, buffers);
    for (size_t first = 0; first < row_count; first += static_cast<size_t>(pass.rows)) {
      pass.rows = static_cast<int32_t>(std::min(most, row_count - first));
      const size_t last = first + static_cast<size_t>(pass.rows);
      buffers.score_rows.assign(rows + first, rows + last);
      dlm::prepare_scores(denoiser, pass, {}, buffers);
      pass.logits = logits + first * width;
      require_before_pass(*session);
      session->passes.spare_context().run(pass, dlm::CacheUse::none, false);
    }
  });
}

dlm_status dlm_session_time_passes(dlm_session* session, int32_t batch, int32_t tokens,
                                   int32_t cached, int32_t rows, double* seconds, size_t repeats) {
  return guarded(session, [&] {
    drop(*session);
    if (repeats > 0) require(seconds, "seconds");
    dlm::time_passes(session->bundle.manifest.denoiser, *session->bundle.engine,
                     session->passes.spare_context(), session->buffers, batch, tokens, cached, rows,
                     seconds, repeats, [&] { require_before_pass(*session); });
  });
}
