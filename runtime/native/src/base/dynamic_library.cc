#include "base/dynamic_library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "base/one_line.h"

namespace dlm {
namespace {

// Opens a library and returns its handle. If the library cannot be opened, returns NULL and sets
// *reason to the message of dlerror().
void* try_library(const std::string& name, std::string* reason) {
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) *reason = one_line(dlerror());
  return handle;
}

// Returns true if the program is linked with -static. In such a program, dlopen loads a second C
// library, and the program then crashes. Every other program contains at least one shared library.
// The kernel's vDSO looks like a library, but is not one.
bool is_static_program() {
  const auto is_library = [](dl_phdr_info* found, size_t, void*) {
    return found->dlpi_name[0] != '\0' && std::strstr(found->dlpi_name, "vdso") == nullptr ? 1 : 0;
  };
  return dl_iterate_phdr(is_library, nullptr) == 0;
}

}  // namespace

void* open_library(const LibrarySearch& search, const std::string& given, std::string* name) {
  const char* const variable = std::getenv(search.variable);
  const std::string what = search.what;
  std::string reason, first_reason;
  if (is_static_program())
    throw Error(DLM_UNSUPPORTED,
                "this program is linked with -static, so it cannot load " + what +
                    ": link it without -static. -static-libstdc++ and -static-libgcc are possible");
  if (!given.empty() || (variable != nullptr && *variable != '\0')) {
    // The user chose a path, so do not try other file names.
    *name = !given.empty() ? given : variable;
    if (void* const handle = try_library(*name, &reason)) return handle;
    const std::string origin =
        given.empty() ? std::string("$") + search.variable : "the given path";
    throw Error(DLM_ENGINE_MISSING,
                "cannot load " + what + " from " + origin + ": " + reason + ". " + search.advice);
  }
  for (const std::string& candidate : search.names) {
    *name = candidate;
    if (void* const handle = try_library(candidate, &reason)) return handle;
    if (first_reason.empty()) first_reason = reason;
  }
  std::string tried = search.names.front();
  for (size_t i = 1; i < search.names.size() && i < 3; ++i) tried += ", " + search.names[i];
  if (search.names.size() > 3) tried += " down to " + search.names.back();
  throw Error(DLM_ENGINE_MISSING, "cannot find " + what + ": tried " + tried + " (" + first_reason +
                                      "). " + search.advice);
}

}  // namespace dlm
