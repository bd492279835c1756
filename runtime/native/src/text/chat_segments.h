// Converts a conversation to text, in the form on which the denoiser was trained. The text ends at
// the position where the assistant's reply starts.
//
// This code does not run the chat template. The bundle's text file contains the texts that the
// template puts before, between and after messages.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/text_file.h"

namespace dlm {

struct ChatMessage {
  std::string_view role, content;  // both texts are UTF-8
};

struct RenderedChat {
  std::string text;
  // The byte range of each message's content in the text, in ascending order. A range contains the
  // bytes from `first` to `last` - 1. Messages with empty content have no range.
  std::vector<std::pair<size_t, size_t>> contents;
};

// Returns the text of a conversation. Throws an Error with status DLM_INVALID_ARGUMENT if a message
// is not valid, for example because its role is unknown. Throws an Error with status
// DLM_UNSUPPORTED if the bundle has no compiled chat template, or if the text file cannot express
// how the template writes this conversation.
RenderedChat render_chat(const TextFile& file, const std::vector<ChatMessage>& messages);

}  // namespace dlm
