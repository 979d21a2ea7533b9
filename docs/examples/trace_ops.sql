-- Ops by time. For traces that msplit writes: trace_processor -q trace_ops.sql trace.json
SELECT process.name AS run, EXTRACT_ARG(slice.arg_set_id, 'args.op') AS op, COUNT(*) AS kernels, SUM(slice.dur) / 1e3 AS us
FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
WHERE slice.category = 'kernel'
GROUP BY process.upid, op ORDER BY us DESC LIMIT 20;
