// A fuzz target that reads a compiled text file. With this file, the target encodes a text, decodes
// the ids in one call and in several calls, and encodes a chat.
//
// The input has three parts: one byte with the size of the text, the text itself, and the text
// file.
#include <vector>

#include "api/handles.h"
#include "base/utf8.h"
#include "fuzz.h"

namespace {

char message[512];

std::vector<int32_t> encode(const dlm_text* text, std::string_view string, int32_t flags) {
  size_t count = 0;
  const dlm_status status = dlm_text_encode(text, string.data(), string.size(), flags, message,
                                            sizeof message, nullptr, 0, &count);
  CLAIM(status == DLM_OK || (fuzz::is_refusal(status) && fuzz::is_sentence(message) && count == 0));
  std::vector<int32_t> ids(count);
  if (status == DLM_OK)
    CLAIM(dlm_text_encode(text, string.data(), string.size(), flags, nullptr, 0, ids.data(), count,
                          &count) == DLM_OK);
  CLAIM(count == ids.size());
  return ids;
}

void decode(const dlm_text* text, const std::vector<int32_t>& ids) {
  size_t size = 0;
  CLAIM(dlm_text_decode(text, ids.data(), ids.size(), message, sizeof message, nullptr, 0, &size) ==
        DLM_OK);
  std::string whole(size, '\0'), pieces;
  CLAIM(dlm_text_decode(text, ids.data(), ids.size(), message, sizeof message, whole.data(), size,
                        &size) == DLM_OK);
  CLAIM(size == whole.size() && dlm::is_utf8(whole));
  dlm::TextDecoder decoder(text->text);
  for (size_t i = 0; i <= ids.size(); ++i) {
    std::string added;
    decoder(ids.data() + i, i < ids.size() ? 1 : 0, i == ids.size(), added);
    CLAIM(dlm::is_utf8(added));
    pieces += added;
  }
  CLAIM(pieces == whole);
}

void render(const dlm_text* text, std::string_view content) {
  static constexpr const char* kRoles[] = {"system", "user", "assistant", "tool", ""};
  std::vector<dlm_message> chat;
  for (const char* const role : kRoles) {
    chat.push_back({role, content.data(), content.size()});
    char rendered[64];
    size_t size = 0;
    const dlm_status status = dlm_chat_render(text, chat.data(), chat.size(), message,
                                              sizeof message, rendered, sizeof rendered, &size);
    CLAIM(status == DLM_OK ||
          (fuzz::is_refusal(status) && fuzz::is_sentence(message) && size == 0));
    size_t count = 0;
    const dlm_status encoded = dlm_chat_encode(text, chat.data(), chat.size(), 0, message,
                                               sizeof message, nullptr, 0, &count);
    CLAIM(encoded == DLM_OK ||
          (fuzz::is_refusal(encoded) && fuzz::is_sentence(message) && count == 0));
    CLAIM(encoded != DLM_OK || status == DLM_OK);
    if (status != DLM_OK) chat.pop_back();
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const std::string_view string = input.text(input.byte());
  const std::string_view file = input.rest();
  dlm_text* text = nullptr;
  const dlm_status status = dlm_text_read(file.data(), file.size(), message, sizeof message, &text);
  CLAIM(status == DLM_OK ? text != nullptr
                         : fuzz::is_refusal(status) && fuzz::is_sentence(message));
  if (status != DLM_OK) return 0;
  std::vector<int32_t> ids = encode(text, string, 0);
  encode(text, string, DLM_ENCODE_PROMPT | DLM_ENCODE_SPECIAL);
  for (const char byte : string) ids.push_back(static_cast<unsigned char>(byte) - 2);
  decode(text, ids);
  render(text, string);
  dlm_text_destroy(text);
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  return fuzz::mutate_numbers(data, size, max_size, size_t{1} + (size > 0 ? data[0] : 0), seed);
}
