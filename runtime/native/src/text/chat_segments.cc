#include "text/chat_segments.h"

#include <algorithm>

#include "base/error.h"
#include "base/json.h"
#include "base/utf8.h"

namespace dlm {
namespace {

constexpr size_t kMostBytes = size_t{1} << 28;

// Returns true for the characters that Python's str.strip removes: white space and four ASCII
// separators.
bool is_stripped(char32_t point) { return is_space(point) || (point >= 0x1C && point <= 0x1F); }

std::string_view stripped(std::string_view text) {
  size_t first = text.size(), last = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t start = at;
    if (is_stripped(next_char(text, at))) continue;
    first = std::min(first, start);
    last = at;
  }
  return first < last ? text.substr(first, last - first) : std::string_view();
}

// Returns the index of a role. If the text file lists a role's name twice, the first entry applies
// to the first message of a conversation, and the second entry to all later messages.
size_t role_of(const TextFile& file, const std::string& where, std::string_view name,
               bool is_first) {
  std::string known;
  size_t found = file.roles.size;
  for (size_t role = 0; role < file.roles.size; ++role) {
    const std::string_view each = file.chat_strings[file.roles[role]];
    if (each == name && (found == file.roles.size || !is_first)) found = role;
    if (known.find(each) == std::string::npos)
      known += (known.empty() ? "" : ", ") + std::string(each);
  }
  if (found < file.roles.size) return found;
  fail(DLM_INVALID_ARGUMENT, "%s: role %s is not one of: %s", where.c_str(),
       json::quoted(name).c_str(), known.c_str());
}

[[noreturn]] void refuse(const std::string& where, const std::string& reason) {
  fail(DLM_UNSUPPORTED,
       "%s: %s. Render the chat in your program, or in Python, which runs the template itself",
       where.c_str(), reason.c_str());
}

std::string_view content_of(const TextFile& file, const std::string& where, size_t context,
                            std::string_view content) {
  if (!is_utf8(content)) fail(DLM_INVALID_ARGUMENT, "%s: the content is not UTF-8", where.c_str());
  const int32_t transform = file.chat_transforms[context];
  if (transform == TextFile::refused)
    refuse(where, "the chat template changes the content of such a message");
  for (size_t i = 0; i < file.literals.size; ++i) {
    const std::string_view literal = file.chat_strings[file.literals[i]];
    if (static_cast<size_t>(file.literal_contexts[i]) == context &&
        content.find(literal) != std::string_view::npos)
      refuse(where, "the chat template looks for " + json::quoted(literal) +
                        " in the content, and finds it");
  }
  const std::string_view kept = transform == TextFile::stripped ? stripped(content) : content;
  const auto is_here = [&](int32_t each) { return static_cast<size_t>(each) == context; };
  if (kept.empty() && std::any_of(file.empty_contexts.begin(), file.empty_contexts.end(), is_here))
    refuse(where, "the chat template treats empty content specially");
  return kept;
}

}  // namespace

RenderedChat render_chat(const TextFile& file, const std::vector<ChatMessage>& messages) {
  if (file.roles.size == 0)
    fail(DLM_UNSUPPORTED,
         "this bundle has no compiled chat: %s. Pass a prompt or tokens instead, or the chat in "
         "Python, which runs any template",
         file.chat_strings.size() > 0 ? std::string(file.chat_strings[0]).c_str()
                                      : "it has no chat template");
  if (messages.empty()) fail(DLM_INVALID_ARGUMENT, "the chat has no messages");
  RenderedChat out;
  size_t before = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string where = "message " + std::to_string(i);
    const size_t role = role_of(file, where, messages[i].role, i == 0),
                 context = 2 * role + (i + 1 == messages.size() ? 1 : 0);
    const int32_t gap = file.chat_gaps[before * 2 * file.roles.size + context];
    if (gap < 0)
      refuse(where,
             "the chat template does not allow this order of roles, or depends on more than the "
             "previous message");
    out.text += file.chat_strings[gap];
    const size_t first = out.text.size();
    out.text += content_of(file, where, context, messages[i].content);
    if (first < out.text.size()) out.contents.emplace_back(first, out.text.size());
    if (out.text.size() > kMostBytes)
      fail(DLM_INVALID_ARGUMENT, "%s: the chat is longer than %zu bytes", where.c_str(),
           kMostBytes);
    before = role + 1;
  }
  const int32_t end = file.chat_ends[before - 1];
  if (end < 0)
    refuse("message " + std::to_string(messages.size() - 1),
           "the chat template allows no reply to such a message");
  out.text += file.chat_strings[end];
  return out;
}

}  // namespace dlm
