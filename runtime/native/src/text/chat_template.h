// A conversation as the text that its denoiser was trained on, up to where the assistant answers.
//
// The template is not run: the text file holds what it puts before, between and after messages.
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
  // [first, last) bytes of each content that is not empty; ascending.
  std::vector<std::pair<size_t, size_t>> contents;
};

// Throws Error(DLM_INVALID_ARGUMENT) for a role that there is none of, and Error(DLM_UNSUPPORTED)
// for a conversation whose text is not known, or not put together from its messages alone.
RenderedChat render_chat(const TextFile& file, const std::vector<ChatMessage>& messages);

}  // namespace dlm
