// Code that all files of the C ABI share: the structs of the handles, checks of arguments, and a
// function that converts exceptions to statuses.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/one_line.h"
#include "base/sized.h"
#include "bundle/manifest.h"
#include "cache/prompt_cache.h"
#include "compile/tokens/vocabulary.h"
#include "constraints/automaton.h"
#include "decode/job.h"
#include "decode/policy.h"
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
  dlm_denoiser denoiser{};
  dlm_bundle_info info{};
  std::mutex text_mutex;
  dlm_text text;  // the bundle's tokenizer and chat template; empty until a call needs them
  std::mutex vocabulary_mutex;
  // The index of the bundle's vocabulary. The first call that compiles a constraint creates it.
  std::shared_ptr<const dlm::compile::Vocabulary> vocabulary;
  // The index of the last vocabulary that the program passed for compiling a constraint.
  std::shared_ptr<const dlm::compile::Vocabulary> given_vocabulary;
  std::array<uint8_t, 32> given_hash{};  // hash of given_vocabulary
  dlm::PromptCaches prompt_caches;
};

struct dlm_job {
  std::shared_ptr<dlm::Job> job;
};

// The handle of a compiled constraint. A running request keeps the automaton alive even if the
// program destroys the handle.
struct dlm_automaton {
  std::shared_ptr<const dlm::Automaton> automaton;
  std::string warnings;
  dlm_automaton_info info{};
};

namespace dlm {

inline void copy_message(const char* text, char* message, size_t capacity) {
  if (message == nullptr || capacity == 0) return;
  const size_t size = std::min(std::strlen(text), capacity - 1);
  std::memcpy(message, text, size);
  message[size] = '\0';
  make_one_line(message, std::strlen(message));
}

// Runs `body`. If `body` throws an exception, calls `report` with the exception's message, and
// returns the exception's status. Does not catch ThreadExit.
template <typename Body, typename Report>
dlm_status guarded(Body body, Report report) {
  try {
    try {
      body();
      return DLM_OK;
    } catch (const ThreadExit&) {
      throw;
    } catch (...) {
      const Failure failure = thrown();
      report(failure.message.c_str());
      return failure.status;
    }
  } catch (const ThreadExit&) {
    throw;
  } catch (...) {
    return DLM_OUT_OF_MEMORY;  // there was not enough memory for the message, so `report` has
                               // thrown an exception
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

// Runs a call that creates an object, and sets *out to the object that `body` returns. If the call
// fails, sets *out to NULL.
template <typename Out, typename Body>
dlm_status make(Out** out, const char* name, char* message, size_t capacity, Body body) {
  if (out != nullptr) *out = nullptr;
  return guarded(message, capacity, [&] {
    require(out, name);
    *out = body();
  });
}

// Checks and returns the caller's policy. If `given` is NULL, returns the bundle's default policy.
Policy choose_policy(const dlm_bundle& bundle, const dlm_policy* given);

// Returns the bundle's tokenizer. The first call reads the bundle's text file.
const dlm_text& text_of(dlm_bundle& bundle);

// Encodes a chat. If `special_tokens` is true and a message contains the text of a special token,
// this text is encoded as the special token.
std::vector<int32_t> encode_chat(const dlm_text& text, const dlm_message* messages, size_t count,
                                 bool special_tokens);

// Checks an array or a text that the caller passed with its number of elements or bytes. A number
// this large is usually a negative number that was converted to size_t.
inline void check_count(const void* pointer, size_t count, const char* name) {
  if (count > 0) require(pointer, name);
  if (count > PTRDIFF_MAX)
    fail(DLM_INVALID_ARGUMENT, "%s: a size of %zu is too large", name, count);
}

// Also rejects a pointer without a count, because the caller has probably forgotten the count.
inline void check_pair(const void* pointer, size_t count, const char* name,
                       const char* count_name) {
  check_count(pointer, count, name);
  if (pointer != nullptr && count == 0)
    fail(DLM_INVALID_ARGUMENT, "%s is set, but %s is 0: set %s, or leave %s NULL", name, count_name,
         count_name, name);
}

// Checks a text that the caller passed, and returns a view of it. `name` is the name of the
// argument in error messages.
inline std::string_view view_of(const char* string, size_t size, const char* name) {
  check_count(string, size, name);
  return {string, size};
}

// Makes a canvas: first the caller's tokens, then `new_tokens` mask tokens.
std::vector<int32_t> make_canvas(const Denoiser& denoiser, const int32_t* tokens, size_t count,
                                 int32_t new_tokens);

// The longest timeout. This is 31 years, which every clock can represent.
constexpr double kLongestMs = 1e12;
inline Clock::duration from_ms(double ms) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::milli>(ms));
}

// A checked dlm_request that is ready to submit. The constructor throws Error if a check fails.
struct Wanted {
  Request request;
  JobOptions options;
};
Wanted read_request(dlm_bundle& bundle, const dlm_request* request);

}  // namespace dlm
