// The C ABI of text: encoding, decoding, and chats.
#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "api/handles.h"
#include "base/error.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

using dlm::guarded, dlm::require, dlm::text_of, dlm::view_of;

namespace {

// As much as there is room for; the whole size is told.
template <class Element>
void give(const Element* from, size_t count, Element* to, size_t capacity, size_t* size) {
  const size_t written = std::min(count, capacity);
  if (written > 0) std::memcpy(to, from, written * sizeof(Element));
  *size = count;
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

}  // namespace

namespace dlm {

std::string_view view_of(const char* string, size_t size, const char* name) {
  if (size > 0) require(string, name);
  return {string, size};
}

const dlm_text& text_of(dlm_bundle& bundle) {
  const std::lock_guard<std::mutex> lock(bundle.text_mutex);
  if (bundle.text.text == nullptr) bundle.text.text = dlm::read_text(bundle.manifest);
  return bundle.text;
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

}  // namespace dlm

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
    const std::vector<int32_t> found = dlm::encode_chat(*text, messages, message_count, flags != 0);
    give(found.data(), found.size(), tokens, capacity, count);
  });
}
