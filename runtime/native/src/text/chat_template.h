// Converts a conversation to text, in the form on which the denoiser was trained. The text ends at
// the position where the assistant's reply starts.
//
// The chat template itself is not run. The bundle's text file contains the text that the template
// puts before, between and after messages.
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
  // The byte range of each message's content in the text, in ascending order. A range contains the
  // bytes from `first` to `last` - 1. Messages with empty content have no range.
  std::vector<std::pair<size_t, size_t>> contents;
};

// Throws Error(DLM_INVALID_ARGUMENT) for an unknown role. Throws Error(DLM_UNSUPPORTED) if the text
// file does not contain the text for this conversation, or if the template does more than join
// messages.
RenderedChat render_chat(const TextFile& file, const std::vector<ChatMessage>& messages);

}  // namespace dlm
