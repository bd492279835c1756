/* Opens bundles, and prints "STATUS<tab>MESSAGE" for each. If a bundle has a compiled text file, this
 * includes opening the text file. If the engine is not "none", this includes a request with a
 * prompt of three tokens. Usage: open_bundles ENGINE BUNDLE [ENGINE BUNDLE]... */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "dlm_runtime.h"

static dlm_status generate(dlm_bundle* bundle, char* message, size_t size) {
  static const int32_t prompt[] = {3, 1, 4};
  dlm_session* session = NULL;
  dlm_status status = dlm_session_create(bundle, message, size, &session);
  if (status == DLM_OK) {
    dlm_request request;
    dlm_request_init(&request, sizeof request);
    request.tokens = prompt, request.token_count = 3, request.max_new_tokens = 40;
    status = dlm_session_generate(session, &request, NULL);
    snprintf(message, size, "%s", dlm_session_last_error(session));
  }
  dlm_session_destroy(session);
  return status;
}

int main(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; i += 2) {
    char message[2048] = "";
    dlm_bundle* bundle = NULL;
    dlm_open_options options;
    dlm_open_options_init(&options, sizeof options);
    options.engine = argv[i];
    options.threads = 1;
    alarm(60); /* ends the program if it hangs; opening a bundle never takes 60 seconds */
    dlm_status status = dlm_bundle_open(argv[i + 1], &options, message, sizeof message, &bundle);
    const dlm_text* text = NULL;
    if (!status && strstr(dlm_bundle_describe(bundle)->manifest, "\"text.bin\""))
      status = dlm_bundle_text(bundle, message, sizeof message, &text);
    if (!status && strcmp(options.engine, "none") != 0)
      status = generate(bundle, message, sizeof message);
    printf("%s\t%s\n", dlm_status_name(status), message);
    fflush(stdout);
    dlm_bundle_destroy(bundle);
  }
  return 0;
}
