#include "compile/schema/uri.h"

namespace dlm::compile::schema {
namespace {

struct Uri {
  std::string_view scheme, authority, path, query;
  bool has_scheme = false, has_authority = false, has_query = false;
};

Uri split(std::string_view text) {
  Uri uri;
  const size_t colon = text.find_first_of(":/?#");
  if (colon != std::string_view::npos && colon > 0 && text[colon] == ':') {
    uri.scheme = text.substr(0, colon), uri.has_scheme = true;
    text.remove_prefix(colon + 1);
  }
  if (text.substr(0, 2) == "//") {
    const size_t end = text.find_first_of("/?", 2);
    uri.authority = text.substr(2, end == std::string_view::npos ? end : end - 2);
    uri.has_authority = true;
    text = end == std::string_view::npos ? std::string_view() : text.substr(end);
  }
  const size_t question = text.find('?');
  uri.path = text.substr(0, question);
  if (question != std::string_view::npos)
    uri.query = text.substr(question + 1), uri.has_query = true;
  return uri;
}

// Removes "." and ".." from a path (section 5.2.4).
std::string without_dots(std::string_view path) {
  std::vector<std::string_view> kept;
  const bool is_absolute = !path.empty() && path[0] == '/';
  if (is_absolute) path.remove_prefix(1);
  bool ends_in_slash = false;
  for (;;) {
    const size_t slash = path.find('/');
    const std::string_view part = path.substr(0, slash);
    ends_in_slash = part == "." || part == "..";
    if (part == "..") {
      if (!kept.empty()) kept.pop_back();
    } else if (part != ".") {
      kept.push_back(part);
    }
    if (slash == std::string_view::npos) break;
    path.remove_prefix(slash + 1);
  }
  std::string out = is_absolute ? "/" : "";
  for (size_t i = 0; i < kept.size(); ++i) {
    if (i > 0) out += '/';
    out += kept[i];
  }
  if (ends_in_slash && !kept.empty()) out += '/';
  return out;
}

std::optional<std::string> percent_decoded(std::string_view text) {
  const auto digit = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
  };
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    if (i + 2 >= text.size() || digit(text[i + 1]) < 0 || digit(text[i + 2]) < 0)
      return std::nullopt;
    out += static_cast<char>(digit(text[i + 1]) * 16 + digit(text[i + 2]));
    i += 2;
  }
  return out;
}

}  // namespace

std::string resolved(std::string_view base, std::string_view reference,
                     std::optional<std::string>& fragment) {
  const size_t hash = reference.find('#');
  fragment = hash == std::string_view::npos ? "" : percent_decoded(reference.substr(hash + 1));
  reference = reference.substr(0, hash);
  if (reference.empty()) return std::string(base);
  const Uri from = split(base);
  Uri to = split(reference);
  std::string path;
  if (to.has_scheme || to.has_authority || (!to.path.empty() && to.path[0] == '/')) {
    // A path that does not start with "/", as in a URN, stays unchanged.
    path = to.has_scheme && !to.has_authority && to.path.substr(0, 1) != "/"
               ? std::string(to.path)
               : without_dots(to.path);
  } else if (to.path.empty()) {
    path = from.path;
    if (!to.has_query) to.query = from.query, to.has_query = from.has_query;
  } else {
    const size_t slash = from.path.rfind('/');
    std::string merged = from.has_authority && from.path.empty() ? "/"
                         : slash == std::string_view::npos
                             ? ""
                             : std::string(from.path.substr(0, slash + 1));
    path = without_dots(merged.append(to.path));
  }
  if (!to.has_scheme) {
    to.scheme = from.scheme, to.has_scheme = from.has_scheme;
    if (!to.has_authority) to.authority = from.authority, to.has_authority = from.has_authority;
  }
  std::string out;
  if (to.has_scheme) out.append(to.scheme).append(":");
  if (to.has_authority) out.append("//").append(to.authority);
  out += path;
  if (to.has_query) out.append("?").append(to.query);
  return out;
}

std::optional<std::vector<std::string>> pointer_steps(std::string_view pointer) {
  std::vector<std::string> steps;
  if (pointer.empty()) return steps;
  if (pointer[0] != '/') return std::nullopt;
  for (size_t i = 0; i < pointer.size(); ++i) {
    if (pointer[i] == '/') {
      steps.emplace_back();
    } else if (pointer[i] == '~') {
      if (i + 1 >= pointer.size() || (pointer[i + 1] != '0' && pointer[i + 1] != '1'))
        return std::nullopt;
      steps.back() += pointer[++i] == '0' ? '~' : '/';
    } else {
      steps.back() += pointer[i];
    }
  }
  return steps;
}

}  // namespace dlm::compile::schema
