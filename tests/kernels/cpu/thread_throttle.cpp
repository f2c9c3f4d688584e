// How many threads run, in made-up time: prints "right", or what was expected.
#include "threads/thread_throttle.h"

#include <cstdio>
#include <cstdlib>

using llmbox::Governor;

namespace {

void expect(bool holds, const char* what) {
    if (holds) return;
    puts(what);
    exit(0);
}

// `seconds` of jobs of 10 ms, of which the slowest thread loses the share `worst`, and the others `rest`.
void work(Governor& governor, double seconds, double worst, double rest = 0) {
    for (double time = 0; time < seconds; time += 0.01) governor.report(0.01, 0.01 * worst, 0.01 * rest);
}

}  // namespace

int main() {
    Governor quiet(8);
    work(quiet, 10, 0.05);
    expect(quiet.threads() == 8, "small losses change nothing");

    Governor governor(2);
    work(governor, 10, 0.5);
    expect(governor.threads() == 2, "two threads, one at half its speed, are as fast as one");
    work(governor, 10, 0.75, 0.75);
    expect(governor.threads() == 2, "where all lose alike all are needed");
    work(governor, 0.25, 0.75);
    expect(governor.threads() == 1, "a thread that runs a quarter of the time is sent away");
    work(governor, 0.3, 0);
    expect(governor.threads() == 1, "it rests for half a second");
    work(governor, 0.4, 0);
    expect(governor.threads() == 2, "then it is tried again");
    work(governor, 0.25, 0.75);
    expect(governor.threads() == 1, "in vain");
    work(governor, 0.7, 0);
    expect(governor.threads() == 1, "it rests twice as long");
    work(governor, 0.6, 0);
    expect(governor.threads() == 2, "and comes back");
    work(governor, 20, 0);
    expect(governor.threads() == 2, "for good when nobody takes its core");

    double alone = 0, together = 0;
    for (int i = 0; i < 100000; i++) {
        governor.report(0.01, governor.threads() == 2 ? 0.0075 : 0, 0);
        (governor.threads() == 1 ? alone : together) += 0.01;
    }
    expect(together < 0.07 * alone, "trials cost little while the core stays taken");

    Governor many(4);
    work(many, 0.5, 0.9);
    expect(many.threads() == 1, "one after the other, never the last");
    Governor brief(2);
    for (int i = 0; i < 100000; i++) brief.report(0.0001, 0.0001, 0);
    expect(brief.threads() == 2, "the shortest jobs say nothing");
    puts("right");
}
