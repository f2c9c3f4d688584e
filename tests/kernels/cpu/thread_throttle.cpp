// How many threads run, in made-up time: prints "right", or what was expected.
#include "threads/thread_throttle.h"

#include <cstdio>
#include <cstdlib>

using llmbox::ThreadThrottle;

namespace {

void expect(bool holds, const char* what) {
    if (holds) return;
    puts(what);
    exit(0);
}

// `seconds` of jobs of 10 ms, of which the slowest thread loses the share `worst`, and the others `rest`.
void work(ThreadThrottle& throttle, double seconds, double worst, double rest = 0) {
    for (double time = 0; time < seconds; time += 0.01) throttle.report(0.01, 0.01 * worst, 0.01 * rest);
}

}  // namespace

int main() {
    ThreadThrottle quiet(8);
    work(quiet, 10, 0.05);
    expect(quiet.threads() == 8, "small losses change nothing");

    ThreadThrottle throttle(2);
    work(throttle, 10, 0.5);
    expect(throttle.threads() == 2, "two threads, one at half its speed, are as fast as one");
    work(throttle, 10, 0.75, 0.75);
    expect(throttle.threads() == 2, "where all lose alike all are needed");
    work(throttle, 0.1, 0.75);
    expect(throttle.threads() == 1, "a thread that runs a quarter of the time is sent away");
    work(throttle, 0.01, 0);
    expect(throttle.threads() == 1, "it rests for a step or two");
    work(throttle, 0.02, 0);
    expect(throttle.threads() == 2, "then it is tried again");
    work(throttle, 0.05, 0.75);
    expect(throttle.threads() == 1, "in vain");
    work(throttle, 0.05, 0);
    expect(throttle.threads() == 1, "it rests twice as long");
    work(throttle, 0.02, 0);
    expect(throttle.threads() == 2, "and comes back");
    for (int trial = 0; trial < 10; trial++) {
        work(throttle, 0.05, 0.75);
        while (throttle.threads() == 1) throttle.report(0.01, 0, 0);
    }
    work(throttle, 0.05, 0.75);
    work(throttle, 0.8, 0);
    expect(throttle.threads() == 1, "after many trials in vain it rests for a second");
    work(throttle, 0.3, 0);
    expect(throttle.threads() == 2, "and no longer");
    work(throttle, 20, 0);
    expect(throttle.threads() == 2, "for good when nobody takes its core");

    double alone = 0, together = 0;
    for (int i = 0; i < 100000; i++) {
        throttle.report(0.01, throttle.threads() == 2 ? 0.0075 : 0, 0);
        (throttle.threads() == 1 ? alone : together) += 0.01;
    }
    expect(together < 0.07 * alone, "trials cost little while the core stays taken");

    // A step of 15 ms in which another process has a core for 60 ms more.
    ThreadThrottle hiccup(2);
    work(hiccup, 5, 0);
    hiccup.report(0.075, 0.06, 0);
    int slow = 0;
    for (int step = 0; step < 100; step++) {
        slow += hiccup.threads() == 1;
        hiccup.report(0.015 * 2 / hiccup.threads(), 0, 0);
    }
    expect(slow <= 2, "a hiccup costs a thread for two steps at most");

    ThreadThrottle many(4);
    work(many, 0.5, 0.9);
    expect(many.threads() == 1, "one after the other, never the last");
    ThreadThrottle brief(2);
    for (int i = 0; i < 100000; i++) brief.report(0.0001, 0.0001, 0);
    expect(brief.threads() == 2, "the shortest jobs say nothing");
    puts("right");
}
