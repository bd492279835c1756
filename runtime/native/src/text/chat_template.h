// Renders a conversation as the text its denoiser was trained on, up to the assistant's reply.
//
// The template is not run: the text file has the text before, between and after messages.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/text_file.h"

namespace dlm {

struct ChatMessage {
  std::string_view role, content;  // UTF-8
};

struct RenderedChat {
  std::string text;
  // Byte ranges [first, last) of the non-empty contents, ascending.
  std::vector<std::pair<size_t, size_t>> contents;
};

// Throws Error(DLM_INVALID_ARGUMENT) for an unknown role. Throws Error(DLM_UNSUPPORTED) if the file
// does not know the conversation's text, or if it is more than the messages put together.
RenderedChat render_chat(const TextFile& file, const std::vector<ChatMessage>& messages);

}  // namespace dlm
