// The C ABI of text: encoding, decoding, chats, and generating from text to text over the calls of
// api/c_api.cc.
#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "api/c_api.h"
#include "api/sized.h"
#include "base/error.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

using dlm::guarded;
using dlm::require;

struct dlm_decoder {
  dlm::TextDecoder decoder;
  std::string added;
};

namespace {

std::string_view view_of(const char* string, size_t size, const char* name) {
  if (size > 0) require(string, name);
  return {string, size};
}

// As much as there is room for; the whole size is told.
template <class Element>
void give(const Element* from, size_t count, Element* to, size_t capacity, size_t* size) {
  const size_t written = std::min(count, capacity);
  if (written > 0) std::memcpy(to, from, written * sizeof(Element));
  *size = count;
}

const dlm_text& text_of(dlm_bundle& bundle) {
  const std::lock_guard<std::mutex> lock(bundle.text_mutex);
  if (bundle.text.text == nullptr) bundle.text.text = dlm::read_text(bundle.manifest);
  return bundle.text;
}

dlm::RenderedChat render(const dlm_text& text, const dlm_message* messages, size_t count) {
  if (count > 0) require(messages, "messages");
  std::vector<dlm::ChatMessage> chat;
  for (size_t i = 0; i < count; ++i) {
    require(messages[i].role, "role");
    chat.push_back(
        {messages[i].role, view_of(messages[i].content, messages[i].content_size, "content")});
  }
  return dlm::render_chat(text.text->file(), chat);
}

std::vector<int32_t> encode_chat(const dlm_text& text, const dlm_message* messages, size_t count,
                                 bool special_tokens) {
  const dlm::RenderedChat chat = render(text, messages, count);
  std::vector<int32_t> found;
  if (special_tokens)
    text.text->encode(chat.text, {false, true}, found);
  else
    text.text->encode_chat(chat, found);
  return found;
}

// A request from text to text: its tokens, and what of its canvas was told as text so far.
class Generating {
 public:
  Generating(dlm_session& session, const dlm_generate_options* options, dlm_text_fn on_text,
             void* user)
      : session_(session),
        on_text_(on_text),
        user_(user),
        decoder_(text_of(dlm::bundle_of(session)).text) {
    options_ = dlm::take_options(dlm::bundle_of(session), options);
    on_step_ = options_.on_step;
    step_user_ = options_.user;
    options_.on_step = [](void* self, const dlm_step* step) {
      return static_cast<Generating*>(self)->on_step(*step);
    };
    options_.user = this;
    is_edited_ = remasks();
    dlm::text_of(session).clear();
  }

  bool special_tokens() const { return options_.special_tokens != 0; }

  void take(std::vector<int32_t> given) {
    tokens_ = std::move(given);
    given_ = tokens_.size();
    const dlm::Denoiser& denoiser = dlm::bundle_of(session_).manifest.denoiser;
    const auto room =
        std::clamp(options_.max_new_tokens, 0,
                   denoiser.max_canvas_length);  // dlm_session_generate says what is wrong
    tokens_.resize(given_ + static_cast<size_t>(room));
    start_ = room > 0 ? given_ : 0;
  }

  dlm_status run() {
    size_t length = 0;
    return dlm_session_generate(&session_, &options_, tokens_.data(), given_, tokens_.size(),
                                nullptr, &length);
  }

  void finish() { tell(tokens_.data(), tokens_.size(), true); }

 private:
  // A token that is committed may still change where the policy edits finished blocks.
  bool remasks() const {
    dlm_policy policy;
    dlm_policy_init(&policy);
    if (options_.policy != nullptr)
      policy = dlm::take(*options_.policy, policy);
    else
      dlm_bundle_preset(&dlm::bundle_of(session_), nullptr, nullptr, 0, &policy);
    return policy.remask != nullptr && std::string_view(policy.remask) == "edit";
  }

  int32_t on_step(const dlm_step& step) {
    const uint8_t* const undecided = dlm_session_undecided(&session_, nullptr);
    auto end = static_cast<size_t>(std::find(undecided, undecided + step.length, 1) - undecided);
    if (is_edited_) end = std::min(end, static_cast<size_t>(step.block_start));
    const int32_t told = step.done != 0 ? 0 : tell(step.canvas, end, false);
    return told != 0 || on_step_ == nullptr ? told : on_step_(step_user_, &step);
  }

  int32_t tell(const int32_t* canvas, size_t end, bool is_last) {
    const dlm::Denoiser& denoiser = dlm::bundle_of(session_).manifest.denoiser;
    std::vector<int32_t> fresh;
    for (; !is_ended_ && read_ + start_ < end; ++read_) {
      const int32_t token = canvas[start_ + read_];
      is_ended_ = std::find(denoiser.eos_token_ids.begin(), denoiser.eos_token_ids.end(), token) !=
                  denoiser.eos_token_ids.end();
      if (!is_ended_ && token != denoiser.mask_token_id) fresh.push_back(token);
    }
    std::string delta;
    decoder_.push(fresh.data(), fresh.size(), is_last, delta);
    dlm::text_of(session_) += delta;
    return delta.empty() || on_text_ == nullptr ? 0 : on_text_(user_, delta.c_str(), delta.size());
  }

  dlm_session& session_;
  const dlm_text_fn on_text_;
  void* const user_;
  dlm::TextDecoder decoder_;
  dlm_generate_options options_{};
  dlm_step_fn on_step_ = nullptr;
  void* step_user_ = nullptr;
  std::vector<int32_t> tokens_;
  size_t given_ = 0, start_ = 0, read_ = 0;
  bool is_edited_ = false, is_ended_ = false;
};

// `encode` makes the tokens of the prompt, from the text file and whether special tokens are
// recognised in the request's text.
template <class EncodePrompt>
dlm_status generate(dlm_session* session, const dlm_generate_options* options, EncodePrompt encode,
                    dlm_text_fn on_text, void* user, const char** text, size_t* size) {
  if (text != nullptr) *text = nullptr;
  if (size != nullptr) *size = 0;
  std::unique_ptr<Generating> generating;
  dlm_status status = dlm::guarded_call(session, [&] {
    require(text, "text");
    require(size, "size");
    generating = std::make_unique<Generating>(*session, options, on_text, user);
    generating->take(encode(text_of(dlm::bundle_of(*session)), generating->special_tokens()));
  });
  if (status == DLM_OK) status = generating->run();
  if (status == DLM_OK) status = dlm::guarded_call(session, [&] { generating->finish(); });
  if (status != DLM_OK) return status;
  *text = dlm::text_of(*session).c_str();
  *size = dlm::text_of(*session).size();
  return DLM_OK;
}

}  // namespace

dlm_status dlm_bundle_text(dlm_bundle* bundle, char* message, size_t message_capacity,
                           const dlm_text** text) {
  if (text != nullptr) *text = nullptr;
  return guarded(message, message_capacity, [&] {
    require(bundle, "bundle");
    require(text, "text");
    *text = &text_of(*bundle);
  });
}

dlm_status dlm_text_read(const void* data, size_t size, char* message, size_t message_capacity,
                         dlm_text** text) {
  if (text != nullptr) *text = nullptr;
  return guarded(message, message_capacity, [&] {
    require(text, "text");
    require(data, "data");
    *text = new dlm_text{std::make_shared<dlm::Text>(data, size, "the text file")};
  });
}

void dlm_text_destroy(dlm_text* text) { delete text; }

dlm_status dlm_text_encode(const dlm_text* text, const char* string, size_t size, int32_t flags,
                           char* message, size_t message_capacity, int32_t* tokens, size_t capacity,
                           size_t* count) {
  if (count != nullptr) *count = 0;
  return guarded(message, message_capacity, [&] {
    require(text, "text");
    require(count, "count");
    if (capacity > 0) require(tokens, "tokens");
    constexpr int32_t known = DLM_ENCODE_PROMPT | DLM_ENCODE_SPECIAL;
    if ((flags & ~known) != 0)
      dlm::fail(DLM_INVALID_ARGUMENT,
                "flags = %d has others than DLM_ENCODE_PROMPT and DLM_ENCODE_SPECIAL", flags);
    std::vector<int32_t> found;
    const dlm::Encode how{(flags & DLM_ENCODE_PROMPT) != 0, (flags & DLM_ENCODE_SPECIAL) != 0};
    text->text->encode(view_of(string, size, "string"), how, found);
    give(found.data(), found.size(), tokens, capacity, count);
  });
}

dlm_status dlm_text_decode(const dlm_text* text, const int32_t* tokens, size_t count, char* message,
                           size_t message_capacity, char* string, size_t capacity, size_t* size) {
  if (size != nullptr) *size = 0;
  return guarded(message, message_capacity, [&] {
    require(text, "text");
    require(size, "size");
    if (count > 0) require(tokens, "tokens");
    if (capacity > 0) require(string, "string");
    std::string found;
    dlm::TextDecoder(text->text).push(tokens, count, true, found);
    give(found.data(), found.size(), string, capacity, size);
  });
}

dlm_status dlm_decoder_create(const dlm_text* text, char* message, size_t message_capacity,
                              dlm_decoder** decoder) {
  if (decoder != nullptr) *decoder = nullptr;
  return guarded(message, message_capacity, [&] {
    require(text, "text");
    require(decoder, "decoder");
    *decoder = new dlm_decoder{dlm::TextDecoder(text->text), {}};
  });
}

void dlm_decoder_destroy(dlm_decoder* decoder) { delete decoder; }

dlm_status dlm_decoder_push(dlm_decoder* decoder, const int32_t* tokens, size_t count,
                            int32_t is_last, const char** string, size_t* size) {
  if (string != nullptr) *string = nullptr;
  if (size != nullptr) *size = 0;
  return guarded(nullptr, 0, [&] {
    require(decoder, "decoder");
    require(string, "string");
    require(size, "size");
    if (count > 0) require(tokens, "tokens");
    decoder->added.clear();
    decoder->decoder.push(tokens, count, is_last != 0, decoder->added);
    *string = decoder->added.c_str();
    *size = decoder->added.size();
  });
}

dlm_status dlm_chat_render(const dlm_text* text, const dlm_message* messages, size_t message_count,
                           char* message, size_t message_capacity, char* string, size_t capacity,
                           size_t* size) {
  if (size != nullptr) *size = 0;
  return guarded(message, message_capacity, [&] {
    require(text, "text");
    require(size, "size");
    if (capacity > 0) require(string, "string");
    const std::string found = render(*text, messages, message_count).text;
    give(found.data(), found.size(), string, capacity, size);
  });
}

dlm_status dlm_chat_encode(const dlm_text* text, const dlm_message* messages, size_t message_count,
                           int32_t flags, char* message, size_t message_capacity, int32_t* tokens,
                           size_t capacity, size_t* count) {
  if (count != nullptr) *count = 0;
  return guarded(message, message_capacity, [&] {
    require(text, "text");
    require(count, "count");
    if (capacity > 0) require(tokens, "tokens");
    if ((flags & ~DLM_ENCODE_SPECIAL) != 0)
      dlm::fail(DLM_INVALID_ARGUMENT, "flags = %d has others than DLM_ENCODE_SPECIAL", flags);
    const std::vector<int32_t> found = encode_chat(*text, messages, message_count, flags != 0);
    give(found.data(), found.size(), tokens, capacity, count);
  });
}

dlm_status dlm_generate_text(dlm_session* session, const dlm_generate_options* options,
                             const char* prompt, size_t prompt_size, dlm_text_fn on_text,
                             void* user, const char** text, size_t* size) {
  const auto encode = [&](const dlm_text& text_file, bool special_tokens) {
    std::vector<int32_t> found;
    text_file.text->encode(view_of(prompt, prompt_size, "prompt"), {true, special_tokens}, found);
    return found;
  };
  return generate(session, options, encode, on_text, user, text, size);
}

dlm_status dlm_generate_chat(dlm_session* session, const dlm_generate_options* options,
                             const dlm_message* messages, size_t message_count, dlm_text_fn on_text,
                             void* user, const char** text, size_t* size) {
  const auto encode = [&](const dlm_text& text_file, bool special_tokens) {
    return encode_chat(text_file, messages, message_count, special_tokens);
  };
  return generate(session, options, encode, on_text, user, text, size);
}
