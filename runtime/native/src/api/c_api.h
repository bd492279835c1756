// What the files of the C ABI share: handles, argument checks, and the wall that no exception
// crosses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "api/sized.h"
#include "base/error.h"
#include "base/one_line.h"
#include "bundle/manifest.h"
#include "constraints/automaton.h"
#include "decode/loop.h"
#include "decode/policy.h"
#include "decode/scheduler.h"
#include "dlm_runtime.h"
#include "engines/engine.h"
#include "text/tokenizer.h"

struct dlm_text {
  std::shared_ptr<const dlm::Text> text;
};

struct dlm_bundle {
  dlm::Manifest manifest;
  std::unique_ptr<dlm::Engine> engine;
  std::string engine_description;
  std::mutex text_mutex;
  dlm_text text;  // once it was asked for
};

// Requests hold the automaton that they began with.
struct dlm_automaton {
  std::shared_ptr<const dlm::Automaton> automaton;
};

namespace dlm {

inline void copy_message(const char* text, char* message, size_t capacity) {
  if (message == nullptr || capacity == 0) return;
  std::strncpy(message, text, capacity - 1);
  message[capacity - 1] = '\0';
  make_one_line(message, std::strlen(message));
}

// Runs `body`. An exception becomes a status, and its message goes to `report`. Throws nothing but
// ThreadExit.
template <typename Body, typename Report>
dlm_status guarded(Body body, Report report) {
  try {
    try {
      body();
      return DLM_OK;
    } catch (const dlm::Error& error) {
      report(error.what());
      return error.status();
    } catch (const std::bad_alloc&) {
      report("out of memory");
      return DLM_OUT_OF_MEMORY;
    } catch (const std::exception& error) {
      report(error.what());
      return DLM_INTERNAL;
    } catch (const ThreadExit&) {
      throw;
    } catch (...) {
      report(kForeign);
      return DLM_INTERNAL;
    }
  } catch (const ThreadExit&) {
    throw;
  } catch (...) {
    return DLM_OUT_OF_MEMORY;  // only a message that found no memory comes here
  }
}

template <typename Body>
dlm_status guarded(char* message, size_t capacity, Body body) {
  copy_message("", message, capacity);
  return guarded(body, [&](const char* text) { copy_message(text, message, capacity); });
}

inline void require(const void* pointer, const char* name) {
  if (pointer == nullptr) dlm::fail(DLM_INVALID_ARGUMENT, "%s is NULL", name);
}

// Copies and checks the caller's options, without the policies. Replaces DLM_DEFAULT_NEW_TOKENS by
// the bundle's number.
dlm_generate_options take_options(const dlm_bundle& bundle, const dlm_generate_options* options);

constexpr double kLongest = 1e12;  // milliseconds: 31 years, which clocks hold

// Of options that have one, counted from now.
Clock::time_point deadline_of(const dlm_generate_options& options);

// The pointers are the outcome's.
dlm_result result_of(const Outcome& outcome);

// `given`, or the bundle's default.
Policy choose_policy(const dlm_bundle& bundle, const dlm_policy* given);

// What a request's text may be.
struct Constraint {
  std::shared_ptr<const Automaton> automaton;  // NULL: anything
  int32_t given = 0;  // tokens in front of the first undecided position that are of the text
};

// As the caller says it. Throws Error(DLM_INVALID_ARGUMENT).
Constraint constraint_of(const dlm_automaton* automaton, int32_t given);

// A request of these tokens and what is new behind them. Throws Error(DLM_INVALID_ARGUMENT,
// DLM_UNSUPPORTED).
Request make_request(const dlm_bundle& bundle, const Constraint& constraint, const Policy& policy,
                     const dlm_generate_options& options, const int32_t* tokens, size_t count,
                     const std::string& name);

// Of a session, whose struct is api/c_api.cc's own.
dlm_bundle& bundle_of(dlm_session& session);
std::string& text_of(dlm_session& session);
dlm_status guarded_call(dlm_session* session, void (*body)(void* user),
                        void* user);  // a call of it, with its last error

template <typename Body>
dlm_status guarded_call(dlm_session* session, Body body) {
  return guarded_call(session, [](void* self) { (*static_cast<Body*>(self))(); }, &body);
}

}  // namespace dlm
