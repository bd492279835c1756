// The struct of a session, which session.cc and cancelling.cc use.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "api/handles.h"
#include "decode/lockstep_passes.h"
#include "decode/runner.h"

struct dlm_session {
  // Runs requests in shared passes. If the prefix cache has room, requests reuse keys and values of
  // earlier requests.
  struct SharedRunner {
    SharedRunner(const dlm::Denoiser& denoiser, std::unique_ptr<dlm::PassMaker> made)
        : passes(std::move(made)), runner(denoiser, *passes, {}) {}

    const std::unique_ptr<dlm::PassMaker> passes;
    dlm::Runner runner;
  };

  explicit dlm_session(dlm_bundle& opened)
      : bundle(opened),
        passes(opened.manifest.denoiser, *opened.engine, {INT64_MAX, INT64_MAX}, 1),
        runner(opened.manifest.denoiser, passes, {}) {
    // Open the engine's context now. Otherwise, only the first request would report that the device
    // has too little memory.
    passes.spare_context();
  }

  dlm_bundle& bundle;
  // By default, the session runs requests in lockstep, with `passes` and `runner`. If `shared` is
  // not NULL, the session can run requests in shared passes instead.
  dlm::LockstepPasses passes;
  dlm::Runner runner;
  std::unique_ptr<SharedRunner> shared;
  uint64_t prefix_cache_bytes = 0;
  // Arrays for passes that run without a request, for example in dlm_session_time_passes.
  dlm::Buffers buffers;
  std::mutex jobs_mutex;
  std::vector<std::shared_ptr<dlm::Job>> jobs;  // the jobs of the last call that ran requests
  // returns false if the session must stop
  std::function<bool()> before_pass = [] { return true; };
  std::string last_error;
  bool is_running = false;  // true during a call and its callbacks
};
