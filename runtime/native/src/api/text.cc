// The text functions of the C ABI: they encode and decode text, and render and encode chats.
#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "api/handles.h"
#include "text/chat_segments.h"

using dlm::require, dlm::text_of, dlm::view_of;

namespace {

// Copies at most `capacity` bytes or ids of the result of `body` to the caller's buffer. Sets
// *count to the full number of bytes or ids, even if the buffer is too small.
template <class Element, class Body>
dlm_status give(const dlm_text* text, char* message, size_t message_capacity, Element* to,
                size_t capacity, size_t* count, Body body) {
  if (count != nullptr) *count = 0;
  return dlm::guarded(message, message_capacity, [&] {
    constexpr bool is_text = std::is_same_v<Element, char>;
    require(text, "text");
    require(count, is_text ? "size" : "count");
    if (capacity > 0) require(to, is_text ? "string" : "tokens");
    const auto found = body();
    std::copy_n(found.data(), std::min(found.size(), capacity), to);
    *count = found.size();
  });
}

void check_flags(int32_t flags, int32_t known, const char* names) {
  if ((flags & ~known) != 0)
    dlm::fail(DLM_INVALID_ARGUMENT, "flags = %d has bits other than %s", flags, names);
}

dlm::RenderedChat render(const dlm_text& text, const dlm_message* messages, size_t count) {
  dlm::check_count(messages, count, "messages");
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
  return dlm::make(text, "text", message, message_capacity, [&] {
    require(bundle, "bundle");
    return &text_of(*bundle);
  });
}

dlm_status dlm_text_read(const void* data, size_t size, char* message, size_t message_capacity,
                         dlm_text** text) {
  return dlm::make(text, "text", message, message_capacity, [&] {
    require(data, "data");
    dlm::check_count(data, size, "data");
    return new dlm_text{std::make_shared<dlm::Text>(data, size, "the text file")};
  });
}

void dlm_text_destroy(dlm_text* text) { delete text; }

dlm_status dlm_text_encode(const dlm_text* text, const char* string, size_t size, int32_t flags,
                           char* message, size_t message_capacity, int32_t* tokens, size_t capacity,
                           size_t* count) {
  return give(text, message, message_capacity, tokens, capacity, count, [&] {
    check_flags(flags, DLM_ENCODE_PROMPT | DLM_ENCODE_SPECIAL,
                "DLM_ENCODE_PROMPT and DLM_ENCODE_SPECIAL");
    std::vector<int32_t> found;
    const dlm::Encode how{(flags & DLM_ENCODE_PROMPT) != 0, (flags & DLM_ENCODE_SPECIAL) != 0};
    text->text->encode(view_of(string, size, "string"), how, found);
    return found;
  });
}

dlm_status dlm_text_decode(const dlm_text* text, const int32_t* tokens, size_t count, char* message,
                           size_t message_capacity, char* string, size_t capacity, size_t* size) {
  return give(text, message, message_capacity, string, capacity, size, [&] {
    dlm::check_count(tokens, count, "tokens");
    std::string found;
    dlm::TextDecoder(text->text)(tokens, count, true, found);
    return found;
  });
}

dlm_status dlm_chat_render(const dlm_text* text, const dlm_message* messages, size_t message_count,
                           char* message, size_t message_capacity, char* string, size_t capacity,
                           size_t* size) {
  return give(text, message, message_capacity, string, capacity, size,
              [&] { return render(*text, messages, message_count).text; });
}

dlm_status dlm_chat_encode(const dlm_text* text, const dlm_message* messages, size_t message_count,
                           int32_t flags, char* message, size_t message_capacity, int32_t* tokens,
                           size_t capacity, size_t* count) {
  return give(text, message, message_capacity, tokens, capacity, count, [&] {
    check_flags(flags, DLM_ENCODE_SPECIAL, "DLM_ENCODE_SPECIAL");
    return dlm::encode_chat(*text, messages, message_count, flags != 0);
  });
}
