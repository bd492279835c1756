// What the files of the C ABI share: handles, checks of arguments, and the exception boundary.
#pragma once

#include <array>
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
#include "compile/vocabulary.h"
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
  dlm_text text;  // once it was asked for
  std::mutex vocabulary_mutex;
  std::shared_ptr<const dlm::compile::Vocabulary> vocabulary;        // once it was compiled for
  std::shared_ptr<const dlm::compile::Vocabulary> given_vocabulary;  // the program's last one
  std::array<uint8_t, 32> given_hash{};                              // of what it was made of
};

// Requests hold the automaton that they began with.
struct dlm_automaton {
  std::shared_ptr<const dlm::Automaton> automaton;
  std::array<uint8_t, 32> made_of{};
  std::string warnings;
  dlm_automaton_info info{};
};

namespace dlm {

inline void copy_message(const char* text, char* message, size_t capacity) {
  if (message == nullptr || capacity == 0) return;
  std::strncpy(message, text, capacity - 1);
  message[capacity - 1] = '\0';
  make_one_line(message, std::strlen(message));
}

// Runs `body`. An exception becomes a status and a message for `report`; only ThreadExit passes.
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

// A call that makes *out, which `body` returns. NULL if it fails.
template <typename Out, typename Body>
dlm_status make(Out** out, const char* name, char* message, size_t capacity, Body body) {
  if (out != nullptr) *out = nullptr;
  return guarded(message, capacity, [&] {
    require(out, name);
    *out = body();
  });
}

// `given`, or the bundle's default.
Policy choose_policy(const dlm_bundle& bundle, const dlm_policy* given);

// The bundle's text, read at the first call.
const dlm_text& text_of(dlm_bundle& bundle);

// Ids of a chat. special_tokens: text of a content that spells a special token is that token.
std::vector<int32_t> encode_chat(const dlm_text& text, const dlm_message* messages, size_t count,
                                 bool special_tokens);

// A view of a caller's text. name: the argument's, for messages.
std::string_view view_of(const char* string, size_t size, const char* name);

// A canvas of the given tokens and mask tokens after them.
std::vector<int32_t> make_canvas(const Denoiser& denoiser, const int32_t* tokens, size_t count,
                                 int32_t new_tokens);

constexpr double kLongestMs = 1e12;  // 31 years, which clocks hold

// A checked dlm_request, ready to be submitted. Throws Error.
struct Wanted {
  Request request;
  JobOptions options;
};
Wanted read_request(dlm_bundle& bundle, const dlm_request* request);

}  // namespace dlm
