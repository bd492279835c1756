// Converts a dlm_request to a Request. Checks the tokens, policy, constraint, limits and text of
// the dlm_request.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api/handles.h"
#include "base/utf8.h"
#include "constraints/constrained.h"

namespace dlm {
namespace {

constexpr int32_t kMostTopLogProbs = 20;  // the limit for top_logprobs in OpenAI's API

dlm_request default_request() {
  dlm_request request{};
  request.struct_size = sizeof request;
  request.max_new_tokens = DLM_DEFAULT_NEW_TOKENS;
  request.text_start = -1;
  return request;
}

void check_options(const dlm_request& request) {
  const auto refuse_negative = [](const char* name, int32_t value) {
    if (value < 0) fail(DLM_INVALID_ARGUMENT, "%s = %d is negative", name, value);
  };
  if (request.max_new_tokens < 0 && request.max_new_tokens != DLM_DEFAULT_NEW_TOKENS)
    fail(DLM_INVALID_ARGUMENT,
         "max_new_tokens = %d is negative and not DLM_DEFAULT_NEW_TOKENS (%d)",
         request.max_new_tokens, DLM_DEFAULT_NEW_TOKENS);
  if (request.new_tokens < 0 || request.new_tokens > INT32_MAX)
    fail(DLM_INVALID_ARGUMENT, "new_tokens = %lld is outside 0..%d",
         static_cast<long long>(request.new_tokens), INT32_MAX);
  if (request.new_tokens > 0 && request.max_new_tokens != DLM_DEFAULT_NEW_TOKENS)
    fail(DLM_INVALID_ARGUMENT,
         "the request has both new_tokens = %lld and max_new_tokens = %d: set one",
         static_cast<long long>(request.new_tokens), request.max_new_tokens);
  refuse_negative("steps", request.steps);
  refuse_negative("max_steps", request.max_steps);
  refuse_negative("constrained_tokens", request.constrained_tokens);
  refuse_negative("prefix_group", request.prefix_group);
  if (!(request.deadline_ms >= 0 && request.deadline_ms <= kLongestMs))
    fail(DLM_INVALID_ARGUMENT, "deadline_ms = %.10g is outside 0..%.10g", request.deadline_ms,
         kLongestMs);
  if (request.top_log_probs < 0 || request.top_log_probs > kMostTopLogProbs)
    fail(DLM_INVALID_ARGUMENT, "top_log_probs = %d is outside 0..%d", request.top_log_probs,
         kMostTopLogProbs);
  if (request.text < DLM_TEXT_NONE || request.text > DLM_TEXT_STEPS)
    fail(DLM_INVALID_ARGUMENT,
         "text = %d is not one of DLM_TEXT_NONE, DLM_TEXT_RESULT and DLM_TEXT_STEPS", request.text);
}

// Encodes the prompt or the chat of the request. If the request has neither, the result is empty.
std::vector<int32_t> encode_given(dlm_bundle& bundle, const dlm_request& request) {
  check_pair(request.tokens, request.token_count, "tokens", "token_count");
  // "" is a prompt. If another text has the size 0, the caller has forgotten the size.
  if (request.prompt == nullptr || request.prompt_size > 0 || *request.prompt != '\0')
    check_pair(request.prompt, request.prompt_size, "prompt", "prompt_size");
  check_pair(request.messages, request.message_count, "messages", "message_count");
  const bool has_tokens = request.token_count > 0, has_prompt = request.prompt != nullptr,
             has_chat = request.message_count > 0;
  if (has_tokens + has_prompt + has_chat > 1)
    fail(DLM_INVALID_ARGUMENT, "the request has several of tokens, prompt and messages: set one");
  std::vector<int32_t> given;
  if (has_prompt)
    text_of(bundle).text->encode(std::string_view{request.prompt, request.prompt_size},
                                 {true, request.special_tokens != 0}, given);
  else if (has_chat)
    given = encode_chat(text_of(bundle), request.messages, request.message_count,
                        request.special_tokens != 0);
  return given;
}

std::vector<std::string> stop_strings_of(const dlm_request& request) {
  std::vector<std::string> found;
  check_pair(request.stop_strings, request.stop_count, "stop_strings", "stop_count");
  for (size_t i = 0; i < request.stop_count; ++i) {
    require(request.stop_strings[i], "stop_strings");
    found.emplace_back(request.stop_strings[i]);
    if (found.back().empty() || !is_utf8(found.back()))
      fail(DLM_INVALID_ARGUMENT, "stop string %zu is %s: remove it, or set a text", i,
           found.back().empty() ? "empty" : "not UTF-8");
  }
  return found;
}

// Returns the largest number of tokens that the request may generate after `count` given tokens.
int32_t most_new_tokens(const dlm_request& request, const Denoiser& denoiser, const Engine& engine,
                        size_t count) {
  if (request.new_tokens > 0) return static_cast<int32_t>(request.new_tokens);
  const int64_t most = request.max_new_tokens == DLM_DEFAULT_NEW_TOKENS ? denoiser.max_new_tokens
                                                                        : request.max_new_tokens;
  const auto given = static_cast<int64_t>(count);
  int64_t longest = std::min<int64_t>(given + most, denoiser.max_canvas_length);
  // With full attention, the first pass runs the whole canvas.
  if (denoiser.visible_block == 0)
    while (longest > given + 1 && engine.max_rows(static_cast<int32_t>(longest), 0) == 0) --longest;
  // If the given tokens leave no room, make_canvas reports an error.
  return static_cast<int32_t>(std::max(longest - given, std::min<int64_t>(most, 1)));
}

std::unique_ptr<TextWriter> writer_of(dlm_bundle& bundle, const dlm_request& request, size_t given,
                                      size_t length) {
  std::vector<std::string> stops = stop_strings_of(request);
  if (request.text == DLM_TEXT_NONE && stops.empty()) return {};
  if (request.text_start < -1 || request.text_start > static_cast<int64_t>(length))
    fail(DLM_INVALID_ARGUMENT, "text_start = %d is neither in the canvas (0..%zu) nor -1",
         request.text_start, length);
  const size_t start = request.text_start >= 0 ? static_cast<size_t>(request.text_start)
                                               : given % length;  // 0 if the request has no new
                                                                  // tokens
  Decode decode = request.decode != nullptr ? decode_by_windows(request.decode, request.user)
                                            : TextDecoder(text_of(bundle).text);
  return std::make_unique<TextWriter>(bundle.manifest.denoiser, std::move(decode), start,
                                      request.text == DLM_TEXT_STEPS, std::move(stops));
}

}  // namespace

Policy choose_policy(const dlm_bundle& bundle, const dlm_policy* given) {
  const Manifest& manifest = bundle.manifest;
  const dlm_policy* const preset = find_policy(manifest.presets, manifest.default_preset);
  return check_policy(given != nullptr ? *given : preset != nullptr ? *preset : default_policy());
}

std::vector<int32_t> make_canvas(const Denoiser& denoiser, const int32_t* tokens, size_t count,
                                 int32_t new_tokens) {
  if (count > 0) require(tokens, "tokens");
  const auto longest = static_cast<size_t>(denoiser.max_canvas_length);
  const size_t length = count + static_cast<size_t>(new_tokens);
  if (count > longest || length > longest)
    fail(DLM_INVALID_ARGUMENT,
         "a canvas of %zu tokens (%zu given and %d new) is longer than the denoiser's %zu: "
         "use fewer tokens",
         length, count, new_tokens, longest);
  if (length == 0)
    fail(DLM_INVALID_ARGUMENT, "the canvas is empty: set tokens, or max_new_tokens to at least 1");
  std::vector<int32_t> canvas(length, denoiser.mask_token_id);
  for (size_t i = 0; i < count; ++i) {
    if (tokens[i] == denoiser.mask_token_id && !denoiser.has_mask_token())
      fail(DLM_UNSUPPORTED,
           "position %zu is to be filled, but this denoiser has no mask token and only generates "
           "text after the given tokens: set max_new_tokens, or use another denoiser",
           i);
    if (tokens[i] < 0 || tokens[i] >= denoiser.vocab_size)
      fail(DLM_INVALID_ARGUMENT, "token id %d at position %zu is outside the vocabulary (0..%d)",
           tokens[i], i, denoiser.vocab_size - 1);
    canvas[i] = tokens[i];
  }
  return canvas;
}

Wanted read_request(dlm_bundle& bundle, const dlm_request* given) {
  require(given, "request");
  dlm_request wanted = take(*given, default_request(), "dlm_request");
  const Denoiser& denoiser = bundle.manifest.denoiser;
  check_options(wanted);
  JobOptions options;
  options.max_steps = wanted.max_steps;
  options.on_step = wanted.on_step;
  options.user = wanted.user;
  if (wanted.deadline_ms > 0) options.deadline = Clock::now() + from_ms(wanted.deadline_ms);
  const Policy policy = choose_policy(bundle, wanted.policy);
  const std::vector<int32_t> encoded = encode_given(bundle, wanted);
  const bool has_tokens = wanted.token_count > 0;
  const size_t given_count = has_tokens ? wanted.token_count : encoded.size();
  const int32_t new_tokens = most_new_tokens(wanted, denoiser, *bundle.engine, given_count);
  std::vector<int32_t> canvas =
      make_canvas(denoiser, has_tokens ? wanted.tokens : encoded.data(), given_count, new_tokens);
  std::vector<uint8_t> undecided;
  for (const int32_t token : canvas) undecided.push_back(token == denoiser.mask_token_id ? 1 : 0);
  // If the denoiser changes the length of canvases, new tokens are the room for longer gaps.
  const bool has_gaps = denoiser.resizes() && wanted.new_tokens == 0 &&
                        std::count(undecided.begin(), undecided.end(), 1) > new_tokens;
  options.writer = writer_of(bundle, wanted, has_gaps ? 0 : given_count, canvas.size());
  int32_t start_tokens = has_gaps ? 0 : new_tokens;
  if (!has_gaps && wanted.new_tokens == 0 && denoiser.visible_block == 0) {
    start_tokens = denoiser.max_new_tokens;
    if (wanted.constraint != nullptr)  // one more token, so that the shortest text can end
      start_tokens = std::max(start_tokens, wanted.constraint->automaton->distances[0] + 1);
  }
  std::unique_ptr<Proposer> proposer;
  if (wanted.constraint != nullptr && (denoiser.resizes() || denoiser.rewrites()))
    fail(DLM_UNSUPPORTED,
         "a constraint does not suit this denoiser, whose loop deletes and inserts tokens: remove "
         "the constraint, or use another denoiser");
  if (wanted.constraint != nullptr)
    proposer = std::make_unique<Constrained>(denoiser, policy, wanted.constraint->automaton,
                                             wanted.constrained_tokens, canvas, undecided);
  return {Request(denoiser, *bundle.engine, policy, std::move(canvas), std::move(undecided),
                  wanted.steps, std::move(proposer), wanted.top_log_probs, wanted.prefix_group,
                  static_cast<int32_t>(given_count) + std::min(start_tokens, new_tokens)),
          std::move(options)};
}

}  // namespace dlm

void dlm_request_init(dlm_request* request, size_t struct_size) {
  dlm::give(dlm::default_request(), struct_size, request);
}
